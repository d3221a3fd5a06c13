/* edges.c: a process at the store's limits: out of descriptors, in a damaged segment.
 *
 * Usage: edges NAME. Each case makes its own store, of one chunk unless it says otherwise; a push of 1 adds
 * -1 to all parameters.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

#define RANKS 3

static const char *armed; /* the failpoint at which `meddle` is called, once */
static void (*meddle)(void);

void pyps_failpoint(const char *name) {
    if (!armed || strcmp(name, armed)) return;
    armed = NULL;
    meddle();
}

static pyps_store *created(uint32_t ranks, uint32_t policy, double round_timeout) {
    return store_of_one_chunk("edges", ranks, policy, round_timeout, 0);
}

static pyps_store *joined(void) { return another_worker("edges"); }

/* Forks a child that joins, and pushes when the parent says so; returns in the parent when it has joined. */
static pid_t peer(int go[2], void (*body)(pyps_store *s, int go)) {
    int ready[2];
    char byte = 0;
    CHECK(!pipe(ready) && !pipe(go), "no pipe");
    pid_t pid = fork();
    if (!pid) {
        pyps_store *s = joined();
        CHECK(write(ready[1], &byte, 1) == 1, "the parent is gone");
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
    CHECK(read(go, &byte, 1) == 1, "no word from the parent");
    must(push_value(s, 1, PYPS_F32, &result), "push");
}

/* A process that cannot look at others must not take them for dead, nor a store that it cannot open for a wrong file. */
static void out_of_descriptors(void) {
    pyps_store *s = created(2, PYPS_ASP, 60), *other;
    int go[2];
    pid_t pid = peer(go, push_when_told);
    uint32_t dead = 9;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    struct rlimit limit, none;
    CHECK(!getrlimit(RLIMIT_NOFILE, &limit), "no limit");
    none = limit, none.rlim_cur = 0;
    CHECK(!setrlimit(RLIMIT_NOFILE, &none), "no limit set");
    must(pyps_reap(s, &dead), "reap");
    expect(pyps_open("edges", PYPS_ABI, &other), PYPS_ESYS, "open");
    CHECK(strstr(pyps_error_message(), "open files"), "found '%s'", pyps_error_message());
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit), "no limit set");
    CHECK(!dead, "a process without descriptors found %u dead", dead);
    let_push(pid, go);
    must(pyps_close(s), "close");
}

static bool no_locks;

/* In place of the C library's: the system has no more locks when a case says so. */
int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (no_locks && command == F_OFD_SETLK) return errno = ENOLCK, -1;
    return (int)syscall(SYS_fcntl, fd, command, argument);
}

/* A slot that cannot be locked is not one that is in use. */
static void out_of_locks(void) {
    pyps_store *s = created(1, PYPS_ASP, 60);
    no_locks = true;
    expect(pyps_join(s, PYPS_WORKER, -1, NULL), PYPS_ESYS, "join");
    no_locks = false;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join"), must(pyps_close(s), "close");
}

enum { SEVENS = 1 << 20 };

/* Another file of this process has got the number `fd`; it is all sevens. */
static void take_descriptor(int fd) {
    static char sevens[SEVENS];
    FILE *own = tmpfile();
    memset(sevens, 7, sizeof sevens);
    CHECK(own && fwrite(sevens, sizeof sevens, 1, own) == 1 && !fflush(own), "no file");
    CHECK(dup2(fileno(own), fd) == fd, "no descriptor");
}

static void check_untouched(int fd) {
    static char found[SEVENS + 1];
    CHECK(pread(fd, found, sizeof found, 0) == SEVENS, "the file is closed, or has another length");
    for (int i = 0; i < SEVENS; i++) CHECK(found[i] == 7, "the file has changed at %d", i);
}

static void check_untouched_by_fork(int fd) {
    int status;
    pid_t child = fork();
    if (!child) check_untouched(fd), _exit(0);
    CHECK(waitpid(child, &status, 0) == child && !status, "a forked child has lost its file");
}

/* The process has closed the segment's descriptor, and another file of its has got the number. */
static void taken_descriptor(void) {
    pyps_store *s = created(1, PYPS_ASP, 60);
    pyps_push_result result;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join"), must(push_value(s, 1, PYPS_F32, &result), "push");
    int fd = s->fd;
    take_descriptor(fd);
    expect(push_value(s, 1, PYPS_F32, &result), PYPS_ESYS, "push");
    expect(pyps_leave(s), PYPS_ESYS, "leave");
    check_untouched_by_fork(fd);
    expect(pyps_close(s), PYPS_ESYS, "close");
    check_untouched(fd);
}

/* The same of the journal's: the journal ends there, the training goes on, and another journal may begin. */
static void taken_journal(void) {
    char path[] = "/tmp/pyps-edges-XXXXXX";
    int file = mkstemp(path);
    pyps_store *s = created(1, PYPS_ASP, 60);
    pyps_push_result result;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    for (int again = 0; again < 2; again++) {
        must(pyps_journal(s, path), "journal"), must(push_value(s, 1, PYPS_F32, &result), "push");
        off_t written = lseek(file, 0, SEEK_END);
        int fd = s->journal;
        take_descriptor(fd);
        check_untouched_by_fork(fd);
        if (!again) must(push_value(s, 1, PYPS_F32, &result), "push");
        must(pyps_journal(s, NULL), "no journal");
        check_untouched(fd);
        CHECK(written > 0 && lseek(file, 0, SEEK_END) == written, "the journal is written to");
    }
    must(pyps_close(s), "close"), must(close(file), "close"), must(remove(path), "remove");
}

static pyps_store *forked_store;

static void close_in_child(void) {
    int status;
    pid_t child = fork();
    if (!child) {
        must(pyps_close(forked_store), "close in the child");
        expect(pyps_close(forked_store), PYPS_EINVAL, "second close in the child");
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status),
          "the child ended with status %d", status);
}

/* A child that is forked while another thread ends a crew has a handle whose crew is half gone. */
static void fork_while_a_crew_ends(void) {
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {20 * PARAMETERS}};
    static const uint32_t batches[] = {4};
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    config.max_participants = 16;
    must(pyps_create("edges", PYPS_ABI, &config, &forked_store), "create");
    must(pyps_join(forked_store, PYPS_WORKER, -1, NULL), "join");
    for (uint32_t threads = 4; threads; threads--) { /* some of them, then those that leave has */
        must(pyps_set_threads(forked_store, 4, NULL), "threads");
        CHECK(crew_threads(forked_store) == 4, "%u threads", crew_threads(forked_store));
        armed = "crew.ending", meddle = close_in_child;
        must(pyps_set_threads(forked_store, 1, NULL), "one thread");
        CHECK(!armed, "no child was forked");
    }
    must(pyps_set_threads(forked_store, 4, NULL), "threads");
    armed = "crew.ending";
    must(pyps_close(forked_store), "close");
    CHECK(!armed, "no child was forked");
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

/* Pushes `value` from that staging; the timeout is too short for a round that others are missing from. */
static int push_staging(pyps_store *s, uint32_t staging, float value, uint32_t samples,
                        pyps_push_result *result) {
    static const pyps_hyper hyper = {.lr = 1};
    for (int i = 0; i < FLAT; i++) pyps_staging(s, staging)[i] = value;
    pyps_push_args args = {.size = sizeof args,
                           .staging = staging,
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
    uint32_t staging;
    must(pyps_start(s, 1, &claim), "start"), must(pyps_stage(s, 1, &staging), "stage");
    expect(push_staging(s, staging, value, claim.count, &result), PYPS_ETIMEDOUT,
           "a push that waits for others");
    return staging;
}

static void check_parameter(pyps_store *s, float value) {
    float flat[FLAT];
    uint64_t version;
    must(pyps_pull(s, flat, &version), "pull");
    CHECK(flat[0] == value, "parameter: found %g; expected %g", (double)flat[0], (double)value);
}

/* A staging buffer that waits in a round is not returned by stage, whatever its owner does meanwhile. */
static void staging_in_round(void) {
    pyps_store *s = created(2, PYPS_BSP, 60), *other = joined();
    pyps_push_result result;
    uint32_t staging;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    uint32_t held = time_out_in_round(s, 1);
    must(pyps_stage(s, 1, &staging), "stage another one");
    expect(push_staging(s, staging, 100, 4, &result), PYPS_EINVAL,
           "a retry of the push with another staging");
    must(pyps_rejoin(s), "rejoin");
    must(pyps_stage(s, 1, &staging), "stage");
    CHECK(staging != held, "staging %u waits in a round and is handed out", staging);
    for (int i = 0; i < FLAT; i++) pyps_staging(s, staging)[i] = 100;
    must(push_value(other, 1, PYPS_F32, &result), "push");
    CHECK(result.sources == 2, "found %u sources", result.sources);
    check_parameter(s, -1);
    must(pyps_rejoin(s), "rejoin"), must(pyps_stage(s, 1, &staging), "stage");
    must(pyps_stage(s, 1, &staging), "both staging buffers are free again");
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

/* The same push again, with the same staging, has the round's outcome. */
static void retry_in_round(void) {
    pyps_store *s = created(2, PYPS_BSP, 60), *other = joined();
    pyps_push_result result;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    uint32_t held = time_out_in_round(s, 1);
    must(push_value(other, 3, PYPS_F32, &result), "push");
    must(push_staging(s, held, 1, 4, &result), "the push again");
    CHECK(result.version == 1 && result.sources == 2, "found version %llu of %u sources",
          (unsigned long long)result.version, result.sources);
    check_parameter(s, -2);
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

/* A worker whose round closed without it starts again; its earlier gradient is in the open round. */
static void check_in_round(void) {
    pyps_store *s = created(3, PYPS_BACKUP, 60), *second = joined(), *third = joined();
    pyps_push_result result;
    uint32_t staging;
    int advice;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    uint32_t held = time_out_in_round(s, 1);
    must(pyps_should_continue(s, 1, 1, &advice), "check");
    must(pyps_stage(s, 1, &staging), "stage");
    CHECK(staging != held, "staging %u waits in a round and is handed out", staging);
    for (int i = 0; i < FLAT; i++) pyps_staging(s, staging)[i] = 100;
    must(push_value(second, 1, PYPS_F32, &result), "push");
    check_parameter(s, -1);
    must(pyps_close(third), "close"), must(pyps_close(second), "close"), must(pyps_close(s), "close");
}

static int allow(const pyps_policy_context *context, uint64_t *state) {
    return (void)context, (void)state, 1;
}

static int admit(const pyps_policy_context *context, uint64_t *state, float *scale) {
    return (void)context, (void)state, (void)scale, 1;
}

/* A process that has not set the policy gets that error, not one of a damaged segment. */
static void unknown_policy(void) {
    int ready_pipe[2], status;
    char byte;
    CHECK(!pipe(ready_pipe), "no pipe");
    pid_t pid = fork();
    if (!pid) {
        pyps_store *s;
        CHECK(read(ready_pipe[0], &byte, 1) == 1, "no word from the parent");
        expect(pyps_open("edges", PYPS_ABI, &s), PYPS_EPOLICY, "open");
        exit(0);
    }
    must(pyps_set_custom(&(pyps_custom){.size = sizeof(pyps_custom), .start = allow, .push = admit}), "set");
    pyps_store *s = created(1, PYPS_CUSTOM, 60);
    CHECK(write(ready_pipe[1], "", 1) == 1 && waitpid(pid, &status, 0) == pid && !status,
          "the other process failed");
    must(pyps_close(s), "close");
}

static struct view *present(const pyps_store *s) {
    uint64_t at = s->layout.views + word_buffer(load_seq(&s->header->view)) * s->layout.view_stride;
    return (struct view *)(void *)(s->base + at);
}

/* Damaged views: a member has another member's rank, or none. */
static void damaged_ranks(void) {
    pyps_store *s = created(2, PYPS_BSP, 60), *other;
    pyps_claim claim;
    must(pyps_join(s, PYPS_WORKER, 0, NULL), "join"), must(pyps_open("edges", PYPS_ABI, &other), "open");
    must(pyps_join(other, PYPS_OBSERVER, -1, NULL), "join"); /* its own view a handle does not read */
    struct view *v = present(s);
    struct member *own = view_member(v, s->slot), *stranger = view_member(v, 7);
    stranger->state = PYPS_ACTIVE, view_rank(v, 1)->slot_plus_1 = 8, v->all_joined = 1;
    expect(pyps_start(s, 1, &claim), PYPS_ECORRUPT, "a rank of a member that has none");
    stranger->rank = 0;
    expect(pyps_start(s, 1, &claim), PYPS_ECORRUPT, "a rank of a member that has another");
    stranger->rank = -1, view_rank(v, 1)->slot_plus_1 = 0;
    expect(pyps_start(s, 1, &claim), PYPS_ECORRUPT, "a worker without a rank");
    stranger->state = PYPS_EMPTY, v->all_joined = 0;
    expect(pyps_start(s, 0, &claim), PYPS_ETIMEDOUT, "nothing wrong");
    own->rank = -1, own->role = PYPS_OBSERVER, view_rank(v, 0)->slot_plus_1 = 0;
    expect(pyps_start(s, 1, &claim), PYPS_EINVAL, "a step of an observer's");
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

/* A full round has no place for one more gradient; a worker that waits for one has a deadline. */
static void full_round(void) {
    pyps_store *s = created(2, PYPS_BSP, 60), *other;
    pyps_push_result result;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join"), other = joined();
    present(s)->staged = present(s)->participants;
    expect(push_value_by(s, 1, PYPS_F32, 0.05, &result), PYPS_ETIMEDOUT, "push");
    present(s)->staged = 0;
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

static struct view *changing;
static void grow_round(void) { changing->round_sources = 1000000; }

/* Values that are read again after a check are checked again. */
static void changing_round(void) {
    pyps_store *s = created(1, PYPS_BSP, 60);
    pyps_push_result result;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    must(push_value(s, 1, PYPS_F32, &result), "push");
    s->ticket.number = 0;
    changing = present(s), armed = "ticket.checked", meddle = grow_round;
    expect(view_load_ticket(s, 1), PYPS_ECORRUPT, "a round of a million");
    changing->round_sources = 1;
    must(view_load_ticket(s, 1), "the same once more");
    CHECK(s->source_count == 1 && s->sources[0].slot == s->slot, "found another round");
    view_ticket(changing, 1)->kind = TICKET_PUSH, s->ticket.number = 0;
    expect(view_load_ticket(s, 1), PYPS_ECORRUPT, "a push of its own, under a policy of rounds");
    must(pyps_close(s), "close");
}

static pyps_store *deciding;
static void change_private_view(void) {
    uint64_t at = deciding->layout.views + deciding->private_view * deciding->layout.view_stride;
    ((struct view *)(void *)(deciding->base + at))->cursor = 1000;
}

/* A view is decided on where no other process can change it meanwhile. */
static void changing_view(void) {
    pyps_store *s = created(1, PYPS_ASP, 60);
    pyps_claim claim;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    deciding = s, armed = "view.copied", meddle = change_private_view;
    must(pyps_start(s, 1, &claim), "start");
    CHECK(!armed && claim.first == 0, "found samples from %llu on", (unsigned long long)claim.first);
    must(pyps_close(s), "close");
}

static void nothing(void) {}

/* A view is read only if another handle has published it. */
static void own_view(void) {
    pyps_store *s = created(2, PYPS_ASP, 60), *other = joined();
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    armed = "view.hazard", meddle = nothing;
    must(pyps_set_max_samples(s, 1), "set"), must(pyps_set_max_samples(s, 2), "set");
    CHECK(armed, "read its own view");
    armed = NULL;
    must(pyps_set_max_samples(other, 3), "set");
    armed = "view.hazard";
    must(pyps_set_max_samples(s, 4), "set");
    CHECK(!armed, "did not read another's view");
    CHECK(!memcmp(s->draft, present(s), view_used_bytes(s->draft)), "published another view than it has");
    for (uint32_t rank = 0; rank < 2; rank++)
        CHECK(view_rank(s->draft, rank)->max_samples == (rank ? 4 : 3), "lost the samples of rank %u", rank);
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

static int refusals;
static int refuse(const pyps_policy_context *context, uint64_t *state, float *scale) {
    (void)context, (void)scale;
    state[0]++;
    return refusals-- > 0 ? -1 : 1;
}

/* What an event that was refused has changed is not published by the next one. */
static void refused_view(void) {
    must(pyps_set_custom(&(pyps_custom){.size = sizeof(pyps_custom), .start = allow, .push = refuse}), "set");
    pyps_store *s = created(1, PYPS_CUSTOM, 60);
    pyps_push_result result;
    pyps_claim claim;
    uint32_t staging;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join"), must(pyps_start(s, 1, &claim), "start");
    must(pyps_stage(s, 1, &staging), "stage");
    refusals = 1;
    expect(push_staging(s, staging, 1, claim.count, &result), PYPS_EPOLICY, "push");
    must(push_staging(s, staging, 1, claim.count, &result), "the same once more");
    CHECK(present(s)->shared_state[0] == 1, "found %llu pushes",
          (unsigned long long)present(s)->shared_state[0]);
    must(pyps_close(s), "close");
}

/* A worker whose push timed out may go on with another step: the round has closed by then. */
static void step_after_time_out(void) {
    pyps_store *s = created(2, PYPS_BSP, 60), *other = joined();
    pyps_push_result result;
    pyps_claim claim;
    uint32_t staging;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    uint32_t held = time_out_in_round(s, 1);
    expect(pyps_start(s, 0.01, &claim), PYPS_ETIMEDOUT, "a start while the round is open");
    must(push_value(other, 1, PYPS_F32, &result), "push");
    must(pyps_start(s, 1, &claim), "start");
    expect(push_staging(s, held, 100, claim.count, &result), PYPS_EINVAL, "another gradient in that buffer");
    must(pyps_stage(s, 1, &staging), "stage");
    expect(push_staging(s, staging, 2, claim.count, &result), PYPS_ETIMEDOUT, "a push into the next round");
    must(push_value(other, 2, PYPS_F32, &result), "push");
    CHECK(result.version == 2 && result.sources == 2, "found version %llu of %u sources",
          (unsigned long long)result.version, result.sources);
    check_parameter(other, -3);
    must(push_staging(s, staging, 2, claim.count, &result), "the push again");
    CHECK(result.version == 2, "found version %llu", (unsigned long long)result.version);
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

/* A gradient that waits in a round is not its worker's to push again: what was refused changes nothing of it. */
static void parked_push(void) {
    pyps_store *s = created(3, PYPS_SOFTSYNC, 60), *second = joined(), *third = joined();
    pyps_push_result result;
    pyps_claim claim;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    must(push_value(s, 1, PYPS_F32, &result), "push");
    must(pyps_start(s, 1, &claim), "start");
    pyps_push_args again = {.size = sizeof again, .samples = claim.count, .scale = 10, .hyper = &push_hyper};
    expect(pyps_push(s, &again, &result), PYPS_EINVAL, "the same buffer once more");
    must(push_value(second, 1, PYPS_F32, &result), "push"),
        must(push_value(third, 1, PYPS_F32, &result), "push");
    CHECK(result.sources == 3, "found %u sources", result.sources);
    check_parameter(third, -1);
    must(pyps_close(third), "close"), must(pyps_close(second), "close"), must(pyps_close(s), "close");
}

/* A look at the store needs no slot: not even in a store whose slots are all taken. */
static void full_house(void) {
    pyps_store *s = created(1, PYPS_ASP, 60), *every[8], *watcher;
    pyps_push_result result;
    pyps_status status;
    pyps_hyper hyper;
    uint32_t dead = 9;
    for (int i = 0; i < 8; i++) {
        must(pyps_open("edges", PYPS_ABI, &every[i]), "open");
        must(pyps_join(every[i], i ? PYPS_OBSERVER : PYPS_WORKER, -1, NULL), "join");
    }
    must(push_value(every[0], 1, PYPS_F32, &result), "push");
    must(pyps_open("edges", PYPS_ABI, &watcher), "open");
    must(pyps_get_status(watcher, &status), "status");
    must(pyps_get_hyper(watcher, &hyper, 1), "hyper");
    must(pyps_reap(watcher, &dead), "reap");
    CHECK(status.version == 1 && hyper.lr == 1 && !dead, "version %llu, lr %g, %u dead",
          (unsigned long long)status.version, (double)hyper.lr, dead);
    for (int i = 0; i < 8; i++) must(pyps_close(every[i]), "close");
    must(pyps_close(watcher), "close"), must(pyps_close(s), "close");
}

/* A round of 2^32 samples: their number does not fit in 32 bits. */
static void huge_round(void) {
    static const uint32_t batches[] = {1u << 31, 1u << 31};
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    pyps_config config = small_config(&tensor, batches, 2, PYPS_BSP);
    pyps_store *s, *other;
    pyps_push_result result;
    pyps_claim claim;
    uint32_t staging;
    must(pyps_create("edges", PYPS_ABI, &config, &s), "create");
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join"), other = joined();
    must(pyps_start(s, 1, &claim), "start"), must(pyps_stage(s, 1, &staging), "stage");
    expect(push_staging(s, staging, 1, claim.count, &result), PYPS_ETIMEDOUT, "push");
    must(push_value(other, 3, PYPS_F32, &result), "the other's push");
    CHECK(result.samples == UINT64_C(1) << 32, "found %llu samples", (unsigned long long)result.samples);
    check_parameter(other, -2);
    must(pyps_close(other), "close"), must(pyps_close(s), "close");
}

/* How parameters are kept gives the size of a buffer: what the header says of it is checked like all else. */
static void false_master(void) {
    static const uint32_t batches[] = {4};
    pyps_tensor tensors[] = {{.name = "w", .ndim = 1, .shape = {PARAMETERS}},
                             {.name = "v", .ndim = 1, .shape = {3}, .group = 1, .kind = PYPS_AVERAGED}};
    pyps_config config = small_config(tensors, batches, 1, PYPS_ASP);
    config.tensors = config.groups = 2, config.master = PYPS_F16;
    pyps_store *s, *opened;
    expect(pyps_create("edges", PYPS_ABI, &config, &s), PYPS_EINVAL, "create");
    config.master = PYPS_BF16;
    must(pyps_create("edges", PYPS_ABI, &config, &s), "create");
    struct geometry *g = &s->header->geometry, good = *g;
    const struct {
        uint32_t master, averaged;
    } bad[] = {{PYPS_INT8, 1}, {PYPS_BF16, 0}, {PYPS_BF16, 2}, {PYPS_F32, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        g->master = bad[i].master, g->averaged = bad[i].averaged;
        s->header->checksum =
            geometry_checksum(g, (void *)(s->base + s->layout.tensors), (void *)(s->base + s->layout.groups));
        struct layout layout;
        if (!layout_compute(g, &layout)) s->header->bytes = layout.bytes;
        must(ftruncate(s->fd, (off_t)s->header->bytes), "size");
        expect(pyps_open("edges", PYPS_ABI, &opened), PYPS_ECORRUPT, "open");
    }
    *g = good;
    must(pyps_close(s), "close");
}

static uint64_t core_time; /* nanoseconds */

static void step_core(pyps_core *core, uint32_t kind, pyps_decision *out) {
    static const uint32_t batches[] = {7};
    pyps_event e = {.size = sizeof e,
                    .kind = kind,
                    .now = ++core_time,
                    .rank = -1,
                    .state = PYPS_DEAD,
                    .batches = batches};
    must(pyps_core_step(core, &e, out), "step");
}

/* Workers die one after the other, each with a part of what the first one had: no sample is forgotten. */
static void many_deaths(void) {
    static const uint32_t batches[] = {1000};
    pyps_config config = {
        .size = sizeof config, .policy = PYPS_ASP, .ranks = 1, .samples = 1000, .batches = batches};
    pyps_core *core;
    pyps_decision d;
    uint32_t assigned = 0;
    must(pyps_core_create(&config, &core), "core");
    for (int i = 0; i < 100; i++) {
        step_core(core, PYPS_ON_JOIN, &d), step_core(core, PYPS_ON_START, &d);
        step_core(core, PYPS_ON_LEAVE, &d);
        if (!i) step_core(core, PYPS_ON_REPLAN, &d);
    }
    step_core(core, PYPS_ON_JOIN, &d);
    while (assigned < 1000) {
        step_core(core, PYPS_ON_START, &d);
        CHECK(d.first == assigned && d.count, "after %u samples: found %u from %llu", assigned, d.count,
              (unsigned long long)d.first);
        assigned += d.count;
        pyps_event push = {.size = sizeof push, .kind = PYPS_ON_PUSH, .now = ++core_time, .samples = d.count};
        must(pyps_core_step(core, &push, &d), "push");
    }
    pyps_core_free(core);
    must(pyps_close(created(1, PYPS_ASP, 60)), "close");
}

static int pushed_in_turn(pyps_store *s) {
    float flat[FLAT];
    pyps_push_result result;
    uint64_t version;
    int rc = push_value_by(s, 1, PYPS_F32, 0, &result);
    return rc ? rc : pyps_pull(s, flat, &version);
}

/* Turns that are set are taken in their order, cycle after cycle; others are refused, and change nothing. */
static void schedule(void) {
    static const uint32_t order[RANKS] = {2, 0, 1};
    pyps_turn turns[RANKS];
    pyps_store *s = created(RANKS, PYPS_R2SP, 60), *workers[RANKS];
    pyps_status status;
    for (uint32_t i = 0; i < RANKS; i++) turns[i] = (pyps_turn){.rank = order[i], .gap_seconds = 1e-6};
    must(pyps_join(s, PYPS_OBSERVER, -1, NULL), "join");
    must(pyps_set_schedule(s, turns, RANKS, 3e-6), "schedule");
    expect(pyps_set_schedule(s, turns, RANKS - 1, 3e-6), PYPS_EINVAL, "a turn too few");
    expect(pyps_set_schedule(s, turns, RANKS, NAN), PYPS_EINVAL, "a period that is no number");
    turns[1].rank = 2;
    expect(pyps_set_schedule(s, turns, RANKS, 3e-6), PYPS_EINVAL, "a rank twice");
    turns[1] = (pyps_turn){.rank = 0, .gap_seconds = -1};
    expect(pyps_set_schedule(s, turns, RANKS, 3e-6), PYPS_EINVAL, "a gap below 0");
    for (uint32_t i = 0; i < RANKS; i++) workers[i] = joined();
    for (uint32_t turn = 0; turn < 4 * RANKS; turn++) {
        must(pyps_get_status(s, &status), "status");
        uint32_t mine = order[turn % RANKS], later = order[(turn + 1) % RANKS];
        CHECK(status.turn_rank == (int)mine, "turn %u is rank %d's; expected %u", turn, status.turn_rank,
              mine);
        expect(pushed_in_turn(workers[later]), PYPS_ETIMEDOUT, "a push before its turn");
        staging_abandon(workers[later]);
        must(pushed_in_turn(workers[mine]), "push");
    }
    for (uint32_t i = 0; i < RANKS; i++) must(pyps_close(workers[i]), "close");
    must(pyps_close(s), "close");
}

static const struct test_case tests[] = {
    {"huge-round", huge_round},
    {"false-master", false_master},
    {"many-deaths", many_deaths},
    {"full-house", full_house},
    {"out-of-descriptors", out_of_descriptors},
    {"out-of-locks", out_of_locks},
    {"taken-descriptor", taken_descriptor},
    {"taken-journal", taken_journal},
    {"fork-while-a-crew-ends", fork_while_a_crew_ends},
    {"first-thread-ends", first_thread_ends},
    {"staging-in-round", staging_in_round},
    {"retry-in-round", retry_in_round},
    {"step-after-time-out", step_after_time_out},
    {"parked-push", parked_push},
    {"check-in-round", check_in_round},
    {"unknown-policy", unknown_policy},
    {"damaged-ranks", damaged_ranks},
    {"full-round", full_round},
    {"changing-round", changing_round},
    {"changing-view", changing_view},
    {"own-view", own_view},
    {"refused-view", refused_view},
    {"schedule", schedule},
};

int main(int argc, char **argv) { return run_case(tests, sizeof tests / sizeof *tests, "edges", argc, argv); }
