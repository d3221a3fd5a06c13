/* edges.c: what a process meets at the store's edges: out of descriptors, out of time, in a damaged segment.
 *
 * Usage: edges NAME. Each case makes its own store, of one chunk unless it says otherwise; a push of 1 adds
 * -1 to all parameters.
 */
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

#define PARAMETERS 1000
#define FLAT       1024
#define RANKS      3

void pyps_failpoint(const char *name) { (void)name; }

static pyps_store *created(uint32_t ranks, uint32_t policy, double round_timeout) {
    static const uint32_t batches[RANKS] = {4, 4, 4};
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    pyps_config config = small_config(&tensor, batches, ranks, policy);
    config.round_timeout_seconds = round_timeout;
    pyps_store *s;
    must(pyps_create("edges", &config, &s), "create");
    return s;
}

static pyps_store *joined(void) {
    pyps_store *s;
    must(pyps_open("edges", &s), "open");
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    return s;
}

static void expect(int found, int code, const char *what) {
    CHECK(found == code, "%s: found %s (%s); expected %s", what, pyps_error_name(found), pyps_error_message(),
          pyps_error_name(code));
}

/* A process that joins and pushes once it is told to, in the child; returns in the parent when it has joined.
 */
static pid_t peer(int go[2], void (*body)(pyps_store *s, int go)) {
    int ready[2];
    char byte = 0;
    CHECK(!pipe(ready) && !pipe(go), "no pipe");
    pid_t pid = fork();
    if (!pid) {
        pyps_store *s = joined();
        CHECK(write(ready[1], &byte, 1) == 1, "nobody to tell");
        body(s, go[0]);
        must(pyps_close(s), "close");
        exit(0);
    }
    CHECK(read(ready[0], &byte, 1) == 1, "the peer did not join");
    return pid;
}

static void let_push(pid_t pid, const int go[2]) {
    int status;
    CHECK(write(go[1], "", 1) == 1 && waitpid(pid, &status, 0) == pid, "no peer");
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status), "the peer was taken for dead");
}

static void push_when_told(pyps_store *s, int go) {
    pyps_push_result result;
    char byte;
    CHECK(read(go, &byte, 1) == 1, "not told");
    must(push_value(s, 1, PYPS_F32, &result), "push");
}

/* Who cannot look at others any more knows nothing of them: least of all that they are dead. */
static void out_of_descriptors(void) {
    pyps_store *s = created(2, PYPS_ASP, 60);
    int go[2];
    pid_t pid = peer(go, push_when_told);
    uint32_t dead = 9;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    struct rlimit limit, none;
    CHECK(!getrlimit(RLIMIT_NOFILE, &limit), "no limit");
    none = limit, none.rlim_cur = 0;
    CHECK(!setrlimit(RLIMIT_NOFILE, &none), "no limit set");
    must(pyps_reap(s, &dead), "reap");
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit), "no limit set");
    CHECK(!dead, "a process without descriptors found %u dead", dead);
    let_push(pid, go);
    must(pyps_close(s), "close");
}

static void *push_in_thread(void *argument) {
    void **given = argument;
    push_when_told(given[0], *(int *)given[1]);
    must(pyps_close(given[0]), "close");
    exit(0);
}

static void leave_to_thread(pyps_store *s, int go) {
    static void *given[2];
    static int from;
    pthread_t thread;
    from = go, given[0] = s, given[1] = &from;
    CHECK(!pthread_create(&thread, NULL, push_in_thread, given), "no thread");
    pthread_exit(NULL);
}

/* A process lives as long as any of its threads, though its first one has ended. */
static void first_thread_ends(void) {
    pyps_store *s = created(1, PYPS_ASP, 60);
    int go[2];
    pid_t pid = peer(go, leave_to_thread);
    uint32_t dead = 9;
    char path[64], line[256] = "", *state = NULL;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    while (!state || state[2] != 'Z') { /* until that thread has ended */
        FILE *file = fopen(path, "r");
        CHECK(file && fgets(line, sizeof line, file) && (state = strrchr(line, ')')), "no peer");
        fclose(file);
    }
    must(pyps_reap(s, &dead), "reap");
    CHECK(!dead, "found %u dead", dead);
    let_push(pid, go);
    must(pyps_close(s), "close");
}

/* Pushes `value` from that area; the timeout is too short for a round that others are missing from. */
static int push_area(pyps_store *s, uint32_t area, float value, uint32_t samples, pyps_push_result *result) {
    static const pyps_hyper hyper = {.lr = 1};
    for (int i = 0; i < FLAT; i++) pyps_staging(s, area)[i] = value;
    pyps_push_args args = {.size = sizeof args,
                           .area = area,
                           .samples = samples,
                           .scale = 1,
                           .timeout_seconds = 0.01,
                           .hyper = &hyper};
    return pyps_push(s, &args, result);
}

/* Stages `value` into the open round, where it stays. */
static uint32_t time_out_in_round(pyps_store *s, float value) {
    pyps_claim claim;
    pyps_push_result result;
    uint32_t area;
    must(pyps_start(s, 1, &claim), "start"), must(pyps_stage(s, 1, &area), "stage");
    expect(push_area(s, area, value, claim.count, &result), PYPS_ETIMEDOUT, "a push that waits for others");
    return area;
}

static void check_parameter(pyps_store *s, float value) {
    float flat[FLAT];
    uint64_t version;
    must(pyps_pull(s, flat, &version), "pull");
    CHECK(flat[0] == value, "parameter: found %g; expected %g", (double)flat[0], (double)value);
}

/* What waits in a round is not handed out, whatever its owner does meanwhile, and nobody else's goes by its
 * ticket. */
static void area_in_round(void) {
    pyps_store *s = created(2, PYPS_BSP, 60), *other = joined();
    pyps_push_result result;
    uint32_t area;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    uint32_t held = time_out_in_round(s, 1);
    must(pyps_stage(s, 1, &area), "stage beside it");
    expect(push_area(s, area, 100, 4, &result), PYPS_EINVAL, "a retry of the push with another area");
    must(pyps_rejoin(s), "rejoin");
    must(pyps_stage(s, 1, &area), "stage");
    CHECK(area != held, "area %u waits in a round and is handed out", area);
    for (int i = 0; i < FLAT; i++) pyps_staging(s, area)[i] = 100;
    must(push_value(other, 1, PYPS_F32, &result), "push");
    CHECK(result.sources == 2, "found %u sources", result.sources);
    check_parameter(s, -1);
    must(pyps_rejoin(s), "rejoin"), must(pyps_stage(s, 1, &area), "stage");
    must(pyps_stage(s, 1, &area), "both areas are free again");
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

/* The same push again, with the same area, has the round's outcome. */
static void retry_in_round(void) {
    pyps_store *s = created(2, PYPS_BSP, 60), *other = joined();
    pyps_push_result result;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    uint32_t held = time_out_in_round(s, 1);
    must(push_value(other, 3, PYPS_F32, &result), "push");
    must(push_area(s, held, 1, 4, &result), "the push again");
    CHECK(result.version == 1 && result.sources == 2, "found version %llu of %u sources",
          (unsigned long long)result.version, result.sources);
    check_parameter(s, -2);
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

/* Who is told that the round went on without it starts again; its earlier gradient is in the open round. */
static void check_in_round(void) {
    pyps_store *s = created(3, PYPS_BACKUP, 60), *second = joined(), *third = joined();
    pyps_push_result result;
    uint32_t area;
    int advice;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    uint32_t held = time_out_in_round(s, 1);
    must(pyps_check(s, 1, 1, &advice), "check");
    must(pyps_stage(s, 1, &area), "stage");
    CHECK(area != held, "area %u waits in a round and is handed out", area);
    for (int i = 0; i < FLAT; i++) pyps_staging(s, area)[i] = 100;
    must(push_value(second, 1, PYPS_F32, &result), "push");
    check_parameter(s, -1);
    must(pyps_close(third), "close"), must(pyps_close(second), "close"), must(pyps_close(s), "close");
}

static const struct {
    const char *name;
    void (*body)(void);
} tests[] = {
    {"out-of-descriptors", out_of_descriptors}, {"first-thread-ends", first_thread_ends},
    {"area-in-round", area_in_round},           {"retry-in-round", retry_in_round},
    {"check-in-round", check_in_round},
};

int main(int argc, char **argv) {
    for (size_t i = 0; argc == 2 && i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(tests[i].name, argv[1])) {
            alarm(60);
            tests[i].body();
            must(pyps_unlink("edges", 0), "unlink");
            return 0;
        }
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) puts(tests[i].name);
    return argc == 1 ? 0 : 2;
}
