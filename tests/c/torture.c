/* torture.c: processes that are killed and stopped at every failpoint of the store, and the parameters that
 * must come out.
 *
 * Usage: torture POLICY OPTIMIZER FAULTS SEED CHUNKS BUFFERS CLIP_NORM PARTS MASTER THREADS DISTANCE: so many chunks,
 * staging buffers a worker, threads of it that apply, and pushes between two faults, about; MASTER is 0, or 1: parameters
 * are kept as bf16. Three workers push, an observer joins and leaves, and a reaper without a slot looks for the dead. Every
 * push has the same gradient, so the parameters at version V are those after V optimizer steps, whichever worker
 * died and wherever: a push lost, doubled or torn, or a norm of other chunks than all, would show in their bits.
 * `expected` takes those steps with the scalar kernels alone. Every codec carries the
 * gradients exactly. Each push draws a codec, error feedback or not, and whether it is an exchange. With PARTS 2 every
 * push is of one half of the parameters, and the pushes that both halves show are together as many as the version.
 *
 * Each draws a fault, how many pushes of all workers it lets pass (none with DISTANCE 0), and how many failpoints then. A stop is short, or longer than the round
 * timeout, so that a worker wakes up fenced; then the process goes on to its next fault, or is killed as it is.
 * Some stops take a second process along, wherever that is. Some faults fork a child there instead, which closes the
 * handle that it got.
 *
 * Where a policy lets steps overlap, workers claim ahead, and lose the result of some of these calls: they name the last
 * claim that they have, and get the lost one again. The observer closes each handle twice, when another one is open.
 */
#include <math.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

#define WORKERS               3
#define CHILDREN              5 /* after the workers: the observer and the reaper */
#define CHUNK                 1024
#define ROUNDED_CHUNKS        4 /* at most, of parameters kept as bf16 */
#define SEED                  7
#define UNUSED                96 /* at the end of the last chunk */
#define PERIOD                7  /* of gradients over the parameters */
#define POINTS                64
#define ROUND_TIMEOUT_SECONDS 0.1
#define SHORT_STOP            UINT64_C(5000000)   /* nanoseconds */
#define LONG_STOP             UINT64_C(250000000) /* nanoseconds; past the round timeout */
#define FORKS                 0                   /* a fault that is no signal */
#define MOST_AHEAD            4

static struct shared {
    _Atomic int finish;
    _Atomic unsigned long acknowledged;
    _Atomic unsigned long forks, lost;    /* claims of which the result was lost */
    _Atomic unsigned long faults[POINTS]; /* by failpoint */
    char names[POINTS][32];
} *shared;

/* 889 = 7 * 127: a whole number of steps of int8 and of int4 */
static const float pattern[PERIOD] = {889, -889, 0, 889, 0, -889, 889};

static unsigned optimizer;
static uint32_t master;
static int parameters, parts; /* parts: 1, or 2 */
static float *flat;           /* [parameters + UNUSED] */
static pyps_hyper hypers[] = {
    [PYPS_SGD] = {.lr = 1},
    [PYPS_MOMENTUM] = {.lr = 0.01f, .momentum = 0.9f, .weight_decay = 0.001f, .nesterov = 1},
    [PYPS_ADAMW] = {.lr = 0.001f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f},
};
static const char *const optimizers[] = {
    [PYPS_SGD] = "sgd", [PYPS_MOMENTUM] = "momentum", [PYPS_ADAMW] = "adamw"};

static uint32_t threads;
static unsigned long distance;           /* pushes between two faults of all processes, about */
static _Atomic unsigned long not_before; /* so many pushes of all workers */
static atomic_long
    countdown; /* failpoints left after that until this process's next fault; 0: no fault is planned */
static int fault;
static _Atomic(pyps_store *) opened; /* by this process */

static void draw_fault(void) {
    long most = 400; /* in a store of many chunks now and then enough to get to the last ones */
    for (int chunks = parameters / CHUNK; chunks > 4 && rand() % 8; chunks /= 2) most *= 2;
    countdown = 1 + rand() % most;
    not_before = shared->acknowledged + (unsigned long)rand() % (2 * CHILDREN * distance + 1);
    fault = rand() % 3 ? SIGKILL : SIGSTOP;
    if (rand() % 8 == 0) fault = FORKS;
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

/* Whatever any thread of this process is doing with its handle. */
static void fork_child(void) {
    int status;
    pid_t child = fork();
    if (!child) {
        pyps_store *theirs = opened;
        int rc = theirs ? pyps_close(theirs) : PYPS_OK;
        _exit(rc && rc != PYPS_EINVAL);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && !status, "a forked child ended with status %d",
          status);
    shared->forks++;
}

void pyps_failpoint(const char *name) {
    if (!countdown || shared->acknowledged < not_before || atomic_fetch_sub(&countdown, 1) != 1) return;
    record(name);
    if (fault == FORKS) fork_child();
    else raise(fault);
    draw_fault(); /* it was no kill, and it is over */
}

/* What clipping multiplies the gradient by; its squares are whole numbers, so their order does not matter. */
static float clip_factor(void) {
    double sum = 0, bound = (double)hypers[optimizer].clip_norm;
    for (int i = 0; i < parameters; i++) sum += (double)pattern[i % PERIOD] * (double)pattern[i % PERIOD];
    return bound > 0 ? (float)(bound / (sqrt(sum) + 1e-6)) : 1.0f;
}

/* Parameters after which they repeat. Where they are rounded, each by its own noise, they never do. */
static int period(void) { return master ? parameters : PERIOD; }

static void round_as_kept(float *params, uint64_t version) {
    static uint8_t halves[2 * CHUNK * ROUNDED_CHUNKS];
    kernels_scalar.narrow(halves, params, (size_t)parameters, &(struct rounding){SEED, version, 0});
    kernels_scalar.decode(PYPS_BF16, params, halves, NULL, (size_t)parameters);
}

/* The first parameters after `version` steps, period() of them; goes on from the version it was last asked for. */
static const float *expected(uint64_t version) {
    static float vectors[2][1 + MAX_STATES][CHUNK * ROUNDED_CHUNKS], gradient[CHUNK * ROUNDED_CHUNKS];
    static uint64_t at;
    for (int i = 0; i < CHUNK * ROUNDED_CHUNKS; i++) gradient[i] = pattern[i % PERIOD];
    if (version < at) memset(vectors, 0, sizeof vectors), at = 0;
    for (; at < version; at++) {
        struct step step = {.gradient = gradient, .length = (size_t)period()};
        for (unsigned v = 0; v <= MAX_STATES; v++)
            step.old[v] = vectors[at % 2][v], step.new[v] = vectors[(at + 1) % 2][v];
        struct step_constants constants =
            kernels_constants(optimizer, &hypers[optimizer], clip_factor(), (double)at, 1);
        kernels_scalar.update[optimizer](&step, &constants);
        if (master) round_as_kept(step.new[0], at + 1);
    }
    return vectors[at % 2][0];
}

static pyps_range part_of(int part) {
    uint64_t half = (uint64_t)parameters / 2, all = (uint64_t)parameters;
    if (parts == 1) return (pyps_range){0, all};
    return part ? (pyps_range){half, all - half} : (pyps_range){0, half};
}

/* How many pushes a half shows: each adds -pattern. */
static uint64_t pushes_of(int part) {
    pyps_range range = part_of(part);
    uint64_t first = (range.first + PERIOD - 1) / PERIOD * PERIOD; /* pattern[0] */
    float pushes = -flat[first] / pattern[0];
    for (uint64_t i = range.first; i < range.first + range.count; i++)
        CHECK(flat[i] == -pushes * pattern[i % PERIOD],
              "parameter %llu: found %.9g; expected that of %g pushes", (unsigned long long)i,
              (double)flat[i], (double)pushes);
    return (uint64_t)pushes;
}

static void check_parts(uint64_t version) {
    uint64_t low = pushes_of(0), high = pushes_of(1);
    CHECK(low + high == version, "version %llu: found %llu and %llu pushes", (unsigned long long)version,
          (unsigned long long)low, (unsigned long long)high);
}

static void check(uint64_t version) {
    if (parts == 2) {
        check_parts(version);
        return;
    }
    const float *right = expected(version);
    for (int i = 0; i < parameters; i++)
        if (memcmp(&flat[i], &right[i % period()], sizeof *flat)) {
            fprintf(stderr, "snapshot of version %llu: parameter %d: found %.9g; expected %.9g\n",
                    (unsigned long long)version, i, (double)flat[i], (double)right[i % period()]);
            exit(1);
        }
}

/* Every chunk of a pull or an exchange is of one version, whichever that is: of one chunk, the one that it has. */
static void check_whole(uint64_t version) {
    if (master) {
        if (parameters < CHUNK) check(version);
        return;
    }
    int half = parts == 2 ? parameters / 2 : 0;
    for (int i = PERIOD; i < parameters; i++)
        if (i % CHUNK >= PERIOD && (i < half || i >= half + PERIOD) &&
            memcmp(&flat[i], &flat[i - PERIOD], sizeof *flat)) {
            fprintf(stderr, "parameter %d: found %.9g; expected %.9g: the chunk is torn\n", i,
                    (double)flat[i], (double)flat[i - PERIOD]);
            exit(1);
        }
}

static pyps_claim held[MOST_AHEAD]; /* after the current one */
static int ahead;

/* Whether the call succeeded; a fenced worker has rejoined, and has no claims. */
static bool done(pyps_store *s, int rc, const char *what) {
    if (rc == PYPS_EREJECTED) return false;
    if (rc == PYPS_EFENCED) must(pyps_rejoin(s), "rejoin"), ahead = 0;
    else must(rc, what);
    return !rc;
}

enum { HASTE = 12 }; /* one push in so many does not wait for others */

static const uint32_t codecs[] = {PYPS_F32, PYPS_F16, PYPS_INT8, PYPS_INT4, PYPS_NF4};

/* A push that does not wait for others; if they are not there, its worker leaves, and joins again. Staged, the gradient
 * counts; else its samples go back. */
static void leave_if_late(pyps_store *s, pyps_push_args *args) {
    pyps_push_result result;
    int rank = s->rank;
    args->timeout_seconds = 0;
    int rc = pyps_push(s, args, &result);
    if (rc == PYPS_ETIMEDOUT) {
        must(pyps_leave(s), "leave"), ahead = 0;
        must(pyps_join(s, PYPS_WORKER, rank, NULL), "join again");
    } else if (done(s, rc, "a hasty push")) {
        shared->acknowledged++;
    }
}

/* The current claim: of those that it has ahead the first, if it has any. */
static bool start(pyps_store *s, pyps_claim *claim) {
    int rc = pyps_start(s, 1, claim);
    if (rc == PYPS_ETIMEDOUT || !done(s, rc, "start")) return false;
    if (!ahead) return true;
    CHECK(claim->first == held[0].first && claim->count == held[0].count,
          "claims: found %u samples from %llu on; it has %u from %llu on", claim->count,
          (unsigned long long)claim->first, held[0].count, (unsigned long long)held[0].first);
    memmove(held, held + 1, (size_t)--ahead * sizeof *held);
    return true;
}

static bool claim_ahead(pyps_store *s, const pyps_claim *current) {
    while (ahead < MOST_AHEAD && rand() % 2) {
        uint64_t last = ahead ? held[ahead - 1].first : current->first;
        pyps_claim claim;
        if (!done(s, pyps_start_ahead(s, last, &claim), "start ahead")) return false;
        if (!claim.count) return true;
        if (rand() % 4 == 0) shared->lost++; /* a signal came when the call had ended */
        else held[ahead++] = claim;
    }
    return true;
}

static void push_once(pyps_store *s) {
    pyps_claim claim;
    pyps_push_result result;
    uint64_t version;
    uint32_t staging;
    if (!start(s, &claim)) return;
    if (!s->policy->waits_for_round && !claim_ahead(s, &claim)) return;
    if (!done(s, pyps_pull(s, flat, &version), "pull")) return;
    check_whole(version);
    must(pyps_stage(s, 20, &staging), "stage");
    pyps_range part = part_of(rand() % 2);
    float *gradient = parts == 2 ? pyps_staging_range(s, staging, part) : pyps_staging(s, staging);
    CHECK(gradient, "no memory for a gradient: %s", pyps_error_message());
    for (uint64_t i = 0; i < part.count; i++) gradient[i] = pattern[(part.first + i) % PERIOD];
    pyps_push_args args = {.size = sizeof args,
                           .staging = staging,
                           .samples = claim.count,
                           .scale = 1,
                           .timeout_seconds = 20,
                           .hyper = &hypers[optimizer],
                           .codec = parts == 2 ? PYPS_F32 : codecs[rand() % 5]};
    if (parts == 2) args.ranges = &part, args.range_count = 1;
    else if (rand() % 2)
        args.weighted = 1, args.weight = 1 + rand() % 8; /* all gradients of a round are alike */
    args.error_feedback = args.codec != PYPS_F32;
    args.nonfinite = (uint32_t)rand() % 3; /* all values are finite */
    if (rand() % HASTE == 0) {
        leave_if_late(s, &args);
    } else if (rand() % 2) {
        if (done(s, pyps_push(s, &args, &result), "push")) shared->acknowledged++;
    } else if (done(s, pyps_exchange(s, &args, flat, &result, &version), "exchange")) {
        shared->acknowledged++;
        check_whole(version);
    }
}

static int keep_shown(void *context, uint64_t first, const float *values, uint64_t count) {
    (void)context;
    memcpy(flat + first, values, count * sizeof *flat);
    return 0;
}

static void snapshot_once(pyps_store *s) {
    uint64_t version;
    int rc = rand() % 2 ? pyps_snapshot(s, flat, NULL, NULL, 5, &version)
                        : pyps_read(s, NULL, 0, keep_shown, NULL, 5, &version);
    if (rc == PYPS_ESTALE || rc == PYPS_ETIMEDOUT) return;
    if (done(s, rc, "snapshot")) check(version);
}

static void work(pyps_store *s, int rank) {
    must(pyps_set_threads(s, threads, NULL), "threads");
    must(pyps_join(s, PYPS_WORKER, rank, NULL), "join");
    while (!shared->finish) {
        push_once(s);
        if (rand() % 8 == 0) snapshot_once(s);
        if (threads > 1 && rand() % 16 == 0)
            must(pyps_set_threads(s, 1 + (uint32_t)rand() % threads, NULL), "other threads");
    }
    must(pyps_leave(s), "leave");
}

/* Of those that do not push: with pushes between faults, they leave these the cores. */
static bool goes_on(void) {
    if (distance) usleep(2000);
    return !shared->finish;
}

/* A second close, of a handle whose address might be another's by then, closes none. */
static pyps_store *opened_again(pyps_store *s) {
    pyps_store *another;
    must(pyps_close(s), "close"), must(pyps_open("torture", PYPS_ABI, &another), "open again");
    expect(pyps_close(s), PYPS_EINVAL, "a second close");
    return opened = another;
}

static void observe(pyps_store *s) {
    uint64_t version;
    while (goes_on()) {
        s = opened_again(s);
        must(pyps_join(s, PYPS_OBSERVER, -1, NULL), "join as an observer");
        must(pyps_pull(s, flat, &version), "an observer's pull");
        check_whole(version);
        if (rand() % 8 == 0) snapshot_once(s);
        must(pyps_leave(s), "an observer's leave");
    }
}

static void reap(pyps_store *s) {
    pyps_status status;
    while (goes_on()) {
        must(pyps_reap(s, NULL), "reap without a slot");
        must(pyps_get_status(s, &status), "status without a slot");
    }
}

static void live(int child, unsigned seed) {
    pyps_store *s;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    srand(seed);
    draw_fault();
    must(pyps_open("torture", PYPS_ABI, &s), "open");
    opened = s;
    if (child < WORKERS) work(s, child);
    else if (child == WORKERS) observe(s);
    else reap(s);
    exit(0);
}

struct child {
    pid_t pid;
    uint64_t resume_at; /* 0: it is not stopped */
    int with;           /* the signal that ends the stop */
};

static void spawn(struct child *children, int index, unsigned seed) {
    children[index] = (struct child){.pid = fork()};
    if (!children[index].pid) live(index, seed);
}

/* Ends the stops that have lasted long enough. */
static void resume(struct child *children) {
    for (int i = 0; i < CHILDREN; i++) {
        struct child *c = &children[i];
        if (!c->resume_at || wait_now_nanoseconds() < c->resume_at) continue;
        c->resume_at = 0;
        kill(c->pid, c->with);
    }
    usleep(300);
}

static int index_of(const struct child *children, pid_t pid) {
    int index = 0;
    while (children[index].pid != pid) index++;
    return index;
}

static void stopped(struct child *children, int index) {
    struct child *other = &children[rand() % CHILDREN];
    children[index].resume_at = wait_now_nanoseconds() + (rand() % 16 ? SHORT_STOP : LONG_STOP);
    children[index].with = rand() % 4 ? SIGCONT : SIGKILL;
    if (rand() % 3 == 0 && other->pid && !other->resume_at) kill(other->pid, SIGSTOP);
}

/* Runs until so many faults have been survived; returns how many processes were killed. */
static unsigned torment(int faults, unsigned seed) {
    struct child children[CHILDREN];
    unsigned kills = 0;
    srand(seed);
    for (int i = 0; i < CHILDREN; i++) spawn(children, i, seed++);
    for (int survived = 0, running = CHILDREN; running;) {
        int status;
        pid_t pid = waitpid(-1, &status, WUNTRACED | WNOHANG);
        if (!pid) {
            resume(children);
            continue;
        }
        int index = index_of(children, pid);
        CHECK(!WIFEXITED(status) || (!WEXITSTATUS(status) && shared->finish), "process %d failed by itself",
              index);
        CHECK(!WIFSIGNALED(status) || WTERMSIG(status) == SIGKILL, "process %d ended with signal %d", index,
              WTERMSIG(status));
        if (!WIFEXITED(status) && ++survived >= faults) shared->finish = 1;
        kills += WIFSIGNALED(status);
        if (WIFSTOPPED(status)) {
            stopped(children, index);
        } else if (shared->finish) {
            children[index] = (struct child){0};
            running--;
        } else {
            spawn(children, index, seed++);
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
    uint64_t version;
    must(pyps_join(s, PYPS_OBSERVER, -1, NULL), "observer");
    must(pyps_reap(s, NULL), "reap");
    must(pyps_snapshot(s, flat, NULL, NULL, 5, &version), "final snapshot");
    check(version);
    unsigned long acknowledged = shared->acknowledged, lost = buffers_lost(s);
    bool alone = !s->policy->stages; /* a push, a ticket */
    if (lost || (alone && (version < acknowledged || version > acknowledged + kills + WORKERS))) {
        fprintf(stderr, "%lu buffers lost; %llu tickets, %lu acknowledged, %u kills\n", lost,
                (unsigned long long)version, acknowledged, kills);
        exit(1);
    }
    printf(
        "%s %s: %d faults survived, %u of them kills; %llu tickets, %lu acknowledged; %lu forks, %lu claims "
        "lost:",
        s->policy->name, optimizers[optimizer], faults, kills, (unsigned long long)version, acknowledged,
        shared->forks, shared->lost);
    for (int i = 0; i < POINTS; i++)
        if (shared->faults[i]) printf(" %s %lu", shared->names[i], shared->faults[i]);
    printf("\n");
}

static pyps_store *created(const char *policy, unsigned staging_buffers) {
    static const uint32_t batches[WORKERS] = {2, 2, 2};
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {(uint64_t)parameters}};
    pyps_config config = small_config(&tensor, batches, WORKERS, policy_numbered(policy));
    config.max_participants = threads > 1 ? 10 + WORKERS * threads : 10,
    config.staging_buffers = staging_buffers;
    config.optimizer = optimizer, config.master = master, config.seed = SEED;
    config.policy_params.bound = 1;
    config.round_timeout_seconds = ROUND_TIMEOUT_SECONDS;
    pyps_store *s;
    must(pyps_create("torture", PYPS_ABI, &config, &s), "create");
    return s;
}

/* A process that reads in /proc of one that has ended, as ps does, holds that one's mapping for a moment, and with it
 * its lock. */
static int remove_name(void) {
    int rc;
    for (int tries = 0; (rc = pyps_unlink("torture", 0)) == PYPS_EBUSY && tries < 1000; tries++) usleep(1000);
    return rc;
}

int main(int argc, char **argv) {
    if (argc != 12) return 2;
    while (strcmp(optimizers[optimizer], argv[2]))
        if (++optimizer == sizeof optimizers / sizeof *optimizers) return 2;
    int faults = atoi(argv[3]), chunks = atoi(argv[5]);
    distance = strtoul(argv[11], NULL, 10);
    alarm(60 + (unsigned)faults * (unsigned)(1 + chunks / 64) * (1 + (unsigned)distance / 20) / 2);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    parameters = chunks * CHUNK - UNUSED, flat = calloc((size_t)chunks, CHUNK * sizeof *flat);
    hypers[optimizer].clip_norm = (float)atof(argv[7]), parts = atoi(argv[8]);
    master = atoi(argv[9]) ? PYPS_BF16 : PYPS_F32, threads = (uint32_t)atoi(argv[10]);
    if (master && chunks > ROUNDED_CHUNKS) return 2;
    pyps_store *s = created(argv[1], (unsigned)atoi(argv[6]));
    unsigned kills = torment(faults, (unsigned)atoi(argv[4]));
    verify(s, faults, kills);
    must(pyps_close(s), "close");
    must(remove_name(), "unlink");
    return 0;
}
