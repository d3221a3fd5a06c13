/* torture.c: workers that are killed and stopped at every failpoint of the store, and the sum that must come
 * out.
 *
 * Usage: torture POLICY KILLS SEED. Every push adds the same whole-number gradient, lr is 1, so after V
 * tickets parameter i is exactly -V * (i % 7 + 1), whoever died where: a push lost, doubled or torn would
 * show in its bits.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../csrc/store.h"

#define WORKERS    3
#define PARAMETERS 4000
#define POINTS     32

static struct shared {
    _Atomic int finish;
    _Atomic unsigned long acknowledged;
    _Atomic unsigned long faults[POINTS]; /* by failpoint */
    char names[POINTS][32];
} *shared;

static long countdown; /* failpoints left until this process's fault; 0: none is due */
static int fault;

static void record(const char *name) {
    unsigned hash = 5381;
    for (const char *p = name; *p; p++) hash = hash * 33 + (unsigned char)*p;
    for (unsigned i = 0; i < POINTS; i++) {
        unsigned at = (hash + i) % POINTS;
        if (shared->names[at][0] && strcmp(shared->names[at], name)) continue;
        strcpy(shared->names[at], name);
        shared->faults[at]++;
        return;
    }
}

void pyps_failpoint(const char *name) {
    if (!countdown || --countdown) return;
    record(name);
    raise(fault);
}

static void must(int rc, const char *what) {
    if (!rc) return;
    fprintf(stderr, "%s: %s: %s\n", what, pyps_error_name(rc), pyps_error_message());
    _exit(1);
}

static void push_once(pyps_store *s, float *flat) {
    pyps_claim claim;
    pyps_push_result result;
    uint64_t version;
    uint32_t area;
    pyps_hyper hyper = {.lr = 1};
    int rc = pyps_start(s, 20, &claim);
    if (rc == PYPS_EFENCED || rc == PYPS_ETIMEDOUT) {
        if (rc == PYPS_EFENCED) must(pyps_rejoin(s), "rejoin");
        return;
    }
    must(rc, "start");
    if ((rc = pyps_pull(s, flat, &version)) == PYPS_EFENCED) {
        must(pyps_rejoin(s), "rejoin");
        return;
    }
    must(rc, "pull");
    must(pyps_stage(s, 20, &area), "stage");
    float *gradient = pyps_staging(s, area);
    for (int i = 0; i < PARAMETERS; i++) gradient[i] = (float)(i % 7 + 1);
    pyps_push_args args = {.size = sizeof args,
                           .area = area,
                           .samples = claim.count,
                           .scale = 1,
                           .timeout_seconds = 20,
                           .hyper = &hyper};
    rc = pyps_push(s, &args, &result);
    if (rc == PYPS_EFENCED) must(pyps_rejoin(s), "rejoin");
    else must(rc, "push");
    if (!rc) shared->acknowledged++;
}

static void work(int rank, unsigned seed) {
    pyps_store *s;
    static float flat[8192];
    srand(seed);
    fault = rand() % 3 ? SIGKILL : SIGSTOP;
    countdown = 1 + rand() % 400;
    must(pyps_open("torture", &s), "open");
    must(pyps_join(s, PYPS_WORKER, rank, NULL), "join");
    while (!shared->finish) {
        push_once(s, flat);
        uint64_t version;
        if (rand() % 8 == 0) {
            int rc = pyps_snapshot(s, flat, NULL, NULL, 5, &version);
            if (rc == PYPS_EFENCED) must(pyps_rejoin(s), "rejoin");
            else if (rc && rc != PYPS_ESTALE && rc != PYPS_ETIMEDOUT) must(rc, "snapshot");
            for (int i = 0; !rc && i < PARAMETERS; i++)
                if (flat[i] != -(float)version * (float)(i % 7 + 1)) must(PYPS_ECORRUPT, "snapshot is torn");
        }
    }
    must(pyps_leave(s), "leave");
    _exit(0);
}

static pid_t spawn(int rank, unsigned seed) {
    pid_t pid = fork();
    if (!pid) work(rank, seed);
    return pid;
}

/* Runs until so many faults have been survived; returns how many were kills. */
static int torment(int faults, unsigned seed, pid_t *pids) {
    int kills = 0;
    for (int rank = 0; rank < WORKERS; rank++) pids[rank] = spawn(rank, seed++);
    for (int done = 0; done < faults; done++) {
        int status;
        pid_t pid = waitpid(-1, &status, WUNTRACED);
        int rank = 0;
        while (rank < WORKERS && pids[rank] != pid) rank++;
        if (WIFSTOPPED(status)) {
            usleep(20000);
            kill(pid, SIGCONT);
            /* Its one fault is over; the next generation of it is killed from outside, wherever it is then.
             */
            usleep(20000);
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
        } else if (!WIFSIGNALED(status)) {
            fprintf(stderr, "rank %d failed by itself\n", rank);
            exit(1);
        }
        kills++;
        pids[rank] = spawn(rank, seed++);
    }
    shared->finish = 1;
    for (int rank = 0; rank < WORKERS; rank++) {
        int status;
        while (waitpid(pids[rank], &status, WUNTRACED) > 0 && WIFSTOPPED(status)) kill(pids[rank], SIGCONT);
    }
    return kills;
}

static void verify(pyps_store *s, int kills) {
    static float flat[8192];
    uint64_t version;
    uint32_t dead;
    must(pyps_join(s, PYPS_OBSERVER, -1, NULL), "observer");
    must(pyps_reap(s, &dead), "reap");
    must(pyps_snapshot(s, flat, NULL, NULL, 5, &version), "final snapshot");
    for (int i = 0; i < PARAMETERS; i++)
        if (flat[i] != -(float)version * (float)(i % 7 + 1)) {
            fprintf(stderr, "parameter %d: found %g; expected %g\n", i, (double)flat[i],
                    -(double)version * (i % 7 + 1));
            exit(1);
        }
    uint32_t held = 0;
    for (uint32_t b = 0; b < s->layout.buffer_count; b++) {
        uint32_t holder = owner_holder(load_acquire(&s->owners[b]));
        held += holder != HOLDER_NOBODY && holder != HOLDER_ABSENT && holder != s->slot + 1;
    }
    unsigned long acknowledged = shared->acknowledged;
    int asp = s->geometry.policy == PYPS_ASP;
    if (held || (asp && (version < acknowledged || version > acknowledged + (unsigned)kills + WORKERS))) {
        fprintf(stderr, "%u buffers lost; %llu tickets, %lu acknowledged, %d kills\n", held,
                (unsigned long long)version, acknowledged, kills);
        exit(1);
    }
    printf("%s: %d faults survived, %llu tickets, %lu acknowledged:", s->policy->name, kills,
           (unsigned long long)version, acknowledged);
    for (int i = 0; i < POINTS; i++)
        if (shared->faults[i]) printf(" %s %lu", shared->names[i], shared->faults[i]);
    printf("\n");
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int faults = atoi(argv[2]);
    alarm(60 + (unsigned)faults);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    uint32_t batches[WORKERS] = {2, 2, 2};
    pyps_config config = {.size = sizeof config,
                          .chunk_params = 1024,
                          .max_participants = 8,
                          .ranks = WORKERS,
                          .groups = 1,
                          .tensors = 1,
                          .policy = strcmp(argv[1], "asp") ? PYPS_BSP : PYPS_ASP,
                          .round_timeout_seconds = 0.3,
                          .batches = batches,
                          .tensor = &tensor};
    pyps_store *s;
    pid_t pids[WORKERS];
    must(pyps_create("torture", &config, &s), "create");
    int kills = torment(faults, (unsigned)atoi(argv[3]), pids);
    verify(s, kills);
    must(pyps_close(s), "close");
    must(pyps_unlink("torture", 0), "unlink");
    return 0;
}
