/* torture.c: workers that are killed and stopped at every failpoint of the store, and the parameters that
 * must come out.
 *
 * Usage: torture POLICY OPTIMIZER FAULTS SEED CLIP_NORM. Every push has the same gradient, so the parameters at
 * version V are those after V optimizer steps, whichever worker died and wherever: a push lost, doubled or torn,
 * or a norm of other chunks than all, would show in their bits. `expected` takes those steps with the scalar
 * kernels alone. Every codec carries the
 * gradients exactly. Each push draws a codec, error feedback or not, and whether it is an exchange.
 *
 * A worker draws a fault and how many failpoints it passes before it. A stop is short, or longer than the
 * round timeout, so that the worker wakes up fenced; then the worker goes on to its next fault, or is killed
 * as it is.
 */
#include <math.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

#define WORKERS               3
#define PARAMETERS            4000
#define CHUNK                 1024
#define FLAT                  8192
#define PERIOD                7 /* of gradients over the parameters */
#define POINTS                64
#define ROUND_TIMEOUT_SECONDS 0.1
#define SHORT_STOP            UINT64_C(5000000)   /* nanoseconds */
#define LONG_STOP             UINT64_C(250000000) /* nanoseconds; past the round timeout */

static struct shared {
    _Atomic int finish;
    _Atomic unsigned long acknowledged;
    _Atomic unsigned long faults[POINTS]; /* by failpoint */
    char names[POINTS][32];
} *shared;

/* 889 = 7 * 127: a whole number of steps of int8 and of int4 */
static const float pattern[PERIOD] = {889, -889, 0, 889, 0, -889, 889};

static unsigned optimizer;
static pyps_hyper hypers[] = {
    [PYPS_SGD] = {.lr = 1},
    [PYPS_MOMENTUM] = {.lr = 0.01f, .momentum = 0.9f, .weight_decay = 0.001f, .nesterov = 1},
    [PYPS_ADAMW] = {.lr = 0.001f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f},
};
static const char *const optimizers[] = {
    [PYPS_SGD] = "sgd", [PYPS_MOMENTUM] = "momentum", [PYPS_ADAMW] = "adamw"};

static long countdown; /* failpoints left until this process's next fault; 0: no fault is planned */
static int fault;

static void draw_fault(void) {
    countdown = 1 + rand() % 400;
    fault = rand() % 3 ? SIGKILL : SIGSTOP;
}

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
    draw_fault(); /* it was a stop, and it is over */
}

/* What clipping multiplies the gradient by; its squares are whole numbers, so their order does not matter. */
static float clip_factor(void) {
    double sum = 0, bound = (double)hypers[optimizer].clip_norm;
    for (int i = 0; i < PARAMETERS; i++) sum += (double)pattern[i % PERIOD] * (double)pattern[i % PERIOD];
    return bound > 0 ? (float)(bound / (sqrt(sum) + 1e-6)) : 1.0f;
}

/* The first PERIOD parameters after `version` steps; goes on from the version it was last asked for. */
static const float *expected(uint64_t version) {
    static float vectors[2][1 + MAX_STATES][PERIOD];
    static uint64_t at;
    if (version < at) memset(vectors, 0, sizeof vectors), at = 0;
    for (; at < version; at++) {
        struct step step = {.gradient = pattern, .length = PERIOD};
        for (unsigned v = 0; v <= MAX_STATES; v++)
            step.old[v] = vectors[at % 2][v], step.new[v] = vectors[(at + 1) % 2][v];
        struct step_constants constants =
            kernels_constants(optimizer, &hypers[optimizer], clip_factor(), (double)at, 1);
        kernels_scalar.update[optimizer](&step, &constants);
    }
    return vectors[at % 2][0];
}

static void check(const float *flat, uint64_t version) {
    const float *right = expected(version);
    for (int i = 0; i < PARAMETERS; i++)
        if (memcmp(&flat[i], &right[i % PERIOD], sizeof *flat)) {
            fprintf(stderr, "snapshot of version %llu: parameter %d: found %.9g; expected %.9g\n",
                    (unsigned long long)version, i, (double)flat[i], (double)right[i % PERIOD]);
            exit(1);
        }
}

/* Every chunk of a pull or an exchange is of one version, whichever that is. */
static void check_whole(const float *flat) {
    for (int i = PERIOD; i < PARAMETERS; i++)
        if (i % CHUNK >= PERIOD && memcmp(&flat[i], &flat[i - PERIOD], sizeof *flat)) {
            fprintf(stderr, "parameter %d: found %.9g; expected %.9g: the chunk is torn\n", i,
                    (double)flat[i], (double)flat[i - PERIOD]);
            exit(1);
        }
}

/* Whether the call succeeded; a fenced worker has rejoined. */
static bool done(pyps_store *s, int rc, const char *what) {
    if (rc == PYPS_EREJECTED) return false;
    if (rc == PYPS_EFENCED) must(pyps_rejoin(s), "rejoin");
    else must(rc, what);
    return !rc;
}

static const uint32_t codecs[] = {PYPS_F32, PYPS_F16, PYPS_INT8, PYPS_INT4, PYPS_NF4};

static void push_once(pyps_store *s, float *flat) {
    pyps_claim claim;
    pyps_push_result result;
    uint64_t version;
    uint32_t staging;
    int rc = pyps_start(s, 1, &claim);
    if (rc == PYPS_ETIMEDOUT || !done(s, rc, "start")) return;
    if (!done(s, pyps_pull(s, flat, &version), "pull")) return;
    check_whole(flat);
    must(pyps_stage(s, 20, &staging), "stage");
    float *gradient = pyps_staging(s, staging);
    for (int i = 0; i < PARAMETERS; i++) gradient[i] = pattern[i % PERIOD];
    pyps_push_args args = {.size = sizeof args,
                           .staging = staging,
                           .samples = claim.count,
                           .scale = 1,
                           .timeout_seconds = 20,
                           .hyper = &hypers[optimizer],
                           .codec = codecs[rand() % 5]};
    args.error_feedback = args.codec != PYPS_F32;
    if (rand() % 2) {
        if (done(s, pyps_push(s, &args, &result), "push")) shared->acknowledged++;
    } else if (done(s, pyps_exchange(s, &args, flat, &result, &version), "exchange")) {
        shared->acknowledged++;
        check_whole(flat);
    }
}

static void snapshot_once(pyps_store *s, float *flat) {
    uint64_t version;
    int rc = pyps_snapshot(s, flat, NULL, NULL, 5, &version);
    if (rc == PYPS_ESTALE || rc == PYPS_ETIMEDOUT) return;
    if (done(s, rc, "snapshot")) check(flat, version);
}

static void work(int rank, unsigned seed) {
    static float flat[FLAT];
    pyps_store *s;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    srand(seed);
    draw_fault();
    must(pyps_open("torture", &s), "open");
    must(pyps_join(s, PYPS_WORKER, rank, NULL), "join");
    while (!shared->finish) {
        push_once(s, flat);
        if (rand() % 8 == 0) snapshot_once(s, flat);
    }
    must(pyps_leave(s), "leave");
    exit(0);
}

struct child {
    pid_t pid;
    uint64_t resume_at; /* 0: it is not stopped */
    int with;           /* the signal that ends the stop */
};

static void spawn(struct child *children, int rank, unsigned seed) {
    children[rank] = (struct child){.pid = fork()};
    if (!children[rank].pid) work(rank, seed);
}

/* Ends the stops that have lasted long enough. */
static void resume(struct child *children) {
    for (int rank = 0; rank < WORKERS; rank++) {
        struct child *c = &children[rank];
        if (!c->resume_at || wait_now_nanoseconds() < c->resume_at) continue;
        c->resume_at = 0;
        kill(c->pid, c->with);
    }
    usleep(300);
}

static int rank_of(const struct child *children, pid_t pid) {
    int rank = 0;
    while (children[rank].pid != pid) rank++;
    return rank;
}

/* Runs until so many faults have been survived; returns how many workers were killed. */
static unsigned torment(int faults, unsigned seed) {
    struct child children[WORKERS];
    unsigned kills = 0;
    srand(seed);
    for (int rank = 0; rank < WORKERS; rank++) spawn(children, rank, seed++);
    for (int survived = 0, running = WORKERS; running;) {
        int status;
        pid_t pid = waitpid(-1, &status, WUNTRACED | WNOHANG);
        if (!pid) {
            resume(children);
            continue;
        }
        int rank = rank_of(children, pid);
        if (WIFEXITED(status) && (WEXITSTATUS(status) || !shared->finish)) {
            fprintf(stderr, "rank %d failed by itself\n", rank);
            exit(1);
        }
        if (!WIFEXITED(status) && ++survived >= faults) shared->finish = 1;
        kills += WIFSIGNALED(status);
        if (WIFSTOPPED(status)) {
            children[rank].resume_at = wait_now_nanoseconds() + (rand() % 16 ? SHORT_STOP : LONG_STOP);
            children[rank].with = rand() % 4 ? SIGCONT : SIGKILL;
        } else if (shared->finish) {
            children[rank] = (struct child){0};
            running--;
        } else {
            spawn(children, rank, seed++);
        }
    }
    return kills;
}

/* Buffers that neither a chunk nor a live participant has: none may be left after the dead are reaped. */
static uint32_t buffers_lost(const pyps_store *s) {
    uint32_t held = 0;
    for (uint32_t b = 0; b < s->layout.buffer_count; b++) {
        uint32_t holder = owner_holder(load_acquire(&s->owners[b]));
        held += holder != HOLDER_NONE && holder != HOLDER_ABSENT && holder != s->slot + 1;
    }
    return held;
}

static void verify(pyps_store *s, int faults, unsigned kills) {
    static float flat[FLAT];
    uint64_t version;
    must(pyps_join(s, PYPS_OBSERVER, -1, NULL), "observer");
    must(pyps_reap(s, NULL), "reap");
    must(pyps_snapshot(s, flat, NULL, NULL, 5, &version), "final snapshot");
    check(flat, version);
    unsigned long acknowledged = shared->acknowledged, lost = buffers_lost(s);
    bool alone = !s->policy->stages; /* a push, a ticket */
    if (lost || (alone && (version < acknowledged || version > acknowledged + kills + WORKERS))) {
        fprintf(stderr, "%lu buffers lost; %llu tickets, %lu acknowledged, %u kills\n", lost,
                (unsigned long long)version, acknowledged, kills);
        exit(1);
    }
    printf("%s %s: %d faults survived, %u of them kills; %llu tickets, %lu acknowledged:", s->policy->name,
           optimizers[optimizer], faults, kills, (unsigned long long)version, acknowledged);
    for (int i = 0; i < POINTS; i++)
        if (shared->faults[i]) printf(" %s %lu", shared->names[i], shared->faults[i]);
    printf("\n");
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    while (strcmp(optimizers[optimizer], argv[2]))
        if (++optimizer == sizeof optimizers / sizeof *optimizers) return 2;
    int faults = atoi(argv[3]);
    hypers[optimizer].clip_norm = (float)atof(argv[5]);
    alarm(60 + (unsigned)faults / 2);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    uint32_t batches[WORKERS] = {2, 2, 2};
    pyps_config config = {
        .size = sizeof config,
        .chunk_params = CHUNK,
        .max_participants = 8,
        .ranks = WORKERS,
        .groups = 1,
        .tensors = 1,
        .optimizer = optimizer,
        .policy = policy_numbered(argv[1]),
        .policy_params =
            {.backup = 1, .bound = 1, .extra = 2, .slack = 1, .patience = 2, .scaling = PYPS_SCALE_NONE},
        .round_timeout_seconds = ROUND_TIMEOUT_SECONDS,
        .batches = batches,
        .tensor = &tensor};
    pyps_store *s;
    must(pyps_create("torture", &config, &s), "create");
    unsigned kills = torment(faults, (unsigned)atoi(argv[4]));
    verify(s, faults, kills);
    must(pyps_close(s), "close");
    must(pyps_unlink("torture", 0), "unlink");
    return 0;
}
