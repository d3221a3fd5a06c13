/* threads.c: participants as threads over one mapping, for ThreadSanitizer, which tells accesses to the same
 * memory by their address: processes, or handles with mappings of their own, would hide every race from it.
 *
 * Usage: threads POLICY ROUNDS CREW. Three steady workers push, two observers pull, one takes strict snapshots,
 * one worker and one unjoined watcher come and go. Every gradient is STEP everywhere, which every codec
 * carries exactly, and the step is w - g, or w - 2 (g / 2) where rounds are clipped: the parameters of version V
 * are -STEP * V.
 */
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common.h"

#define PARAMETERS 5000
#define CHUNK      1024
#define FLAT       5120
#define STEADY     3
#define THREADS    8
#define STEP       127.0f

static pyps_store *first; /* all participants share its mapping */
static long rounds;
static uint32_t crew; /* threads of each steady worker */
static atomic_int steady_left = STEADY;
static atomic_ulong pushes, snapshots, cancelled, visits;

void pyps_failpoint(const char *name) { (void)name; }

static pyps_store *opened(void) {
    pyps_store *s;
    must(pyps_open("threads", PYPS_ABI, &s), "open");
    munmap(s->base, s->layout.bytes);
    s->base = first->base, s->header = first->header, s->slots = first->slots, s->words = first->words;
    s->saved = first->saved, s->owners = first->owners, s->view_owners = first->view_owners;
    return s;
}

static void closed(pyps_store *s) {
    s->role = PYPS_OBSERVER; /* its staging buffers stay mapped, for the others */
    if (s->slot != NONE) must(pyps_leave(s), "leave");
    s->base = NULL; /* not this handle's to unmap */
    must(pyps_close(s), "close");
}

static void check_chunks(const float *flat, uint64_t oldest, bool all) {
    for (int i = 0; i < PARAMETERS; i++) {
        float whole = flat[i / CHUNK * CHUNK];
        CHECK(flat[i] == whole, "parameter %d: found %g and %g: the chunk is torn", i, (double)flat[i],
              (double)whole);
        CHECK(all ? whole == -STEP * (float)oldest : whole <= -STEP * (float)oldest,
              "parameter %d: found %g in version %llu", i, (double)whole, (unsigned long long)oldest);
    }
}

static void push_one(pyps_store *s, unsigned turn) {
    static const uint32_t codecs[] = {PYPS_F32, PYPS_INT8, PYPS_F16, PYPS_NF4};
    pyps_push_result result;
    int rc = push_value(s, STEP, codecs[turn % 4], &result);
    if (rc == PYPS_EFENCED) must(pyps_rejoin(s), "rejoin");
    else must(rc, "push");
    pushes++;
}

struct copy {
    float *from, *to;
    uint64_t end;
};

/* As a device would: what has arrived is read while others are applied. */
static int follow(void *context, uint64_t begin, uint64_t count) {
    struct copy *copy = context;
    CHECK(begin == copy->end, "told of %llu after %llu", (unsigned long long)begin,
          (unsigned long long)copy->end);
    memcpy(copy->to + begin, copy->from + begin, count * sizeof *copy->to);
    copy->end = begin + count;
    return 0;
}

static void exchange_one(pyps_store *s, float *flat) {
    static _Thread_local float device[FLAT];
    struct copy copy = {flat, device, 0};
    pyps_claim claim;
    pyps_push_result result;
    pyps_push_args args = {.size = sizeof args, .scale = 1, .timeout_seconds = 10, .hyper = &push_hyper};
    uint64_t version;
    int rc = pyps_start(s, 10, &claim);
    if (!rc) rc = pyps_stage(s, 10, &args.staging);
    if (!rc) {
        float *gradient = pyps_staging(s, args.staging);
        for (uint64_t i = 0; i < store_elements(s); i++) gradient[i] = STEP;
        args.samples = claim.count;
        rc = pyps_exchange_arriving(s, &args, flat, CHUNK, follow, &copy, &result, &version);
    }
    if (rc == PYPS_EFENCED) {
        must(pyps_rejoin(s), "rejoin");
        return;
    }
    must(rc, "exchange");
    pushes++;
    CHECK(copy.end == FLAT, "told of %llu floats", (unsigned long long)copy.end);
    CHECK(!memcmp(device, flat, sizeof device), "what was told changed afterwards");
    check_chunks(device, version, false);
}

static void *steady(void *argument) {
    static atomic_uint seed;
    unsigned turn = seed++;
    (void)argument;
    pyps_store *s = opened();
    float *flat = malloc(FLAT * sizeof *flat);
    uint64_t version;
    must(pyps_join(s, PYPS_WORKER, (int)turn, NULL), "join");
    must(pyps_set_threads(s, crew, NULL), "threads");
    CHECK(crew_threads(s) == crew, "%u threads", crew_threads(s));
    for (long i = 0; i < rounds; i++) {
        if (i % 4 == 3) exchange_one(s, flat);
        push_one(s, turn + (unsigned)i);
        must(pyps_pull(s, flat, &version), "a worker's pull");
        check_chunks(flat, version, false);
    }
    closed(s);
    free(flat);
    steady_left--;
    return NULL;
}

/* A worker for a few pushes at a time; it begins before the first step and so opens the run. */
static void *passing(void *argument) {
    (void)argument;
    for (unsigned turn = 0; steady_left; turn++) {
        pyps_store *s = opened();
        must(pyps_join(s, PYPS_WORKER, STEADY, NULL), "join");
        for (unsigned i = 0; i < 3 && steady_left; i++) push_one(s, turn + i);
        closed(s);
        visits++;
    }
    return NULL;
}

static void *pull(void *argument) {
    float *flat = malloc(FLAT * sizeof *flat);
    uint64_t version, before = 0;
    (void)argument;
    pyps_store *s = opened();
    must(pyps_join(s, PYPS_OBSERVER, -1, NULL), "join");
    while (steady_left) {
        must(pyps_pull(s, flat, &version), "pull");
        CHECK(version >= before, "the version went back");
        before = version;
        check_chunks(flat, version, false);
    }
    closed(s);
    free(flat);
    return NULL;
}

static void *snapshot(void *argument) {
    float *flat = malloc(FLAT * sizeof *flat);
    uint64_t version;
    (void)argument;
    pyps_store *s = opened();
    must(pyps_join(s, PYPS_OBSERVER, -1, NULL), "join");
    while (steady_left) {
        int rc = pyps_snapshot(s, flat, NULL, NULL, 5, &version);
        if (rc == PYPS_ESTALE) {
            cancelled++;
            continue;
        }
        must(rc, "snapshot");
        check_chunks(flat, version, true);
        snapshots++;
    }
    closed(s);
    free(flat);
    return NULL;
}

static void *watch(void *argument) {
    (void)argument;
    while (steady_left) {
        pyps_status status;
        pyps_store *s = opened();
        must(pyps_get_status(s, &status), "status");
        must(pyps_reap(s, NULL), "reap");
        closed(s);
    }
    return NULL;
}

static void verify(void) {
    float *flat = malloc(FLAT * sizeof *flat);
    uint64_t version;
    must(pyps_join(first, PYPS_OBSERVER, -1, NULL), "join");
    must(pyps_snapshot(first, flat, NULL, NULL, 5, &version), "final snapshot");
    check_chunks(flat, version, true);
    CHECK(first->policy->stages || version == pushes, "%lu pushes gave version %llu", pushes,
          (unsigned long long)version);
    for (uint32_t b = 0; b < first->layout.buffer_count; b++) {
        uint32_t holder = owner_holder(load_acquire(&first->owners[b]));
        CHECK(holder == HOLDER_NONE || holder == HOLDER_ABSENT || holder == first->slot + 1,
              "buffer %u is lost to slot %u", b, holder - 1);
    }
    printf("%s: version %llu after %lu pushes; %lu snapshots, %lu cancelled; %lu visits\n",
           first->policy->name, (unsigned long long)version, pushes, snapshots, cancelled, visits);
    free(flat);
}

int main(int argc, char **argv) {
    static void *(*const bodies[THREADS])(void *) = {steady, steady, steady,   passing,
                                                     pull,   pull,   snapshot, watch};
    pthread_t threads[THREADS];
    if (argc != 4 || (rounds = atol(argv[2])) < 1) return 2;
    crew = (uint32_t)atoi(argv[3]);
    alarm(300);
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    uint32_t batches[] = {1, 2, 3, 4};
    pyps_config config = small_config(&tensor, batches, STEADY + 1, policy_numbered(argv[1]));
    config.max_participants = 12 + STEADY * crew;
    must(pyps_create("threads", PYPS_ABI, &config, &first), "create");
    if (first->policy->stages) push_hyper = (pyps_hyper){.lr = 2, .clip_norm = STEP * sqrtf(PARAMETERS) / 2};
    for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, bodies[i], NULL), "no thread");
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    verify();
    must(pyps_close(first), "close");
    must(pyps_unlink("threads", 0), "unlink");
    return 0;
}
