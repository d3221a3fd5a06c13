/* calls.c: random calls of the public interface, by several processes on one segment at once.
 *
 * Usage: calls SEED CALLS PROCESSES. Half of the calls are the steps of a trainer with sound arguments, so that there
 * is something to harm; the others come in any order, with odd numbers among their arguments. A call may fail, but
 * must not say that the store is damaged. The program ends with 1 if one does, or if a process dies.
 */
#include <inttypes.h>
#include <math.h>
#include <sys/wait.h>

#include "common.h"

enum { MOST = 8 * 4096, RANGES = 4, RANKS = 8 }; /* MOST: floats of the largest flat vector */

void pyps_failpoint(const char *place) { (void)place; }

static const char *segment = "calls";
static char journal[256];
static pyps_store *s;      /* of this process; NULL: closed */
static pyps_store *closed; /* the last one that was */
static pyps_layout layout;
static uint32_t staged; /* the staging buffer that was given last */
static float flat[MOST], values[MOST], vectors[2][MOST];
static float *const states[2] = {vectors[0], vectors[1]};
static uint8_t codes[4 * MOST + 64];
static double steps[64];
static uint64_t number = 1;

static uint64_t draw(uint64_t below) { /* xorshift64* (Vigna 2016) */
    number ^= number >> 12, number ^= number << 25, number ^= number >> 27;
    return number * UINT64_C(2685821657736338717) % below;
}

static bool seldom(uint64_t in) { return !draw(in); }

/* A number that a caller may have got wrong. */
static uint32_t odd(void) {
    static const uint32_t telling[] = {0, 1, UINT32_MAX, UINT32_C(1) << 31};
    return seldom(2) ? telling[draw(4)] : (uint32_t)draw(9);
}

static double odd_seconds(void) {
    static const double telling[] = {-1, 0, (double)NAN, 1e-9, 0.01, 0.02};
    return telling[draw(6)];
}

/* ---- stores ---- */

static pyps_config some_config(pyps_tensor *tensors, uint32_t *batches) {
    pyps_config c = small_config(tensors, batches, 1 + (uint32_t)draw(2), (uint32_t)draw(PYPS_CUSTOM));
    for (int rank = 0; rank < RANKS; rank++) batches[rank] = rank ? (uint32_t)draw(6) : 4;
    c.tensors = 1 + (uint32_t)draw(2), c.groups = 1 + (uint32_t)draw(2);
    for (uint32_t t = 0; t < 2; t++) {
        tensors[t] = (pyps_tensor){.ndim = 1, .shape = {1 + draw(1500)}, .group = t < c.groups ? t : 0};
        snprintf(tensors[t].name, sizeof tensors[t].name, "t%" PRIu32, t);
    }
    if (c.groups == 2 && c.tensors == 2 && seldom(2)) tensors[1].kind = PYPS_AVERAGED;
    c.optimizer = (uint32_t)draw(5), c.master = seldom(4) ? PYPS_BF16 : PYPS_F32;
    c.samples = seldom(2) ? draw(500) : 0, c.round_timeout_seconds = seldom(3) ? 0.05 : 0.2;
    c.max_participants = seldom(6) ? 2 : 6, c.staging_buffers = seldom(3) ? (uint32_t)draw(9) : 2;
    c.snapshot_spares = (uint32_t)draw(3);
    c.policy_params = (pyps_policy_params){
        .splits = 1, .bound = (uint32_t)draw(3), .quantile = 0.5, .patience = 2, .slack = 1};
    c.policy_params.threshold = (uint32_t)draw(4), c.policy_params.late = (uint32_t)draw(2);
    c.policy_params.abort = (uint32_t)draw(2), c.policy_params.noise = 1;
    if (seldom(20)) c.policy = odd();
    if (seldom(20)) c.optimizer = odd();
    if (seldom(20)) c.chunk_params = 1024 * odd();
    if (seldom(20)) c.policy_params.scaling = odd();
    return c;
}

static int close_store(void) {
    int rc = pyps_close(s);
    closed = s, s = NULL;
    return rc;
}

/* Whichever handle has been opened since, it is another one. */
static int close_again(void) {
    if (closed) expect(pyps_close(closed), PYPS_EINVAL, "a second close");
    return 0;
}

/* A program of an earlier header, whose open has two arguments: the second lies where the ABI is expected. */
static int open_by_old_header(void) {
    pyps_store *out = (pyps_store *)&out;
    pyps_tensor tensors[2];
    uint32_t batches[RANKS], theirs = seldom(2) ? (uint32_t)(uintptr_t)&out : PYPS_ABI - 1;
    pyps_config c = some_config(tensors, batches);
    expect(pyps_open(segment, theirs, seldom(2) ? NULL : &out), PYPS_EABI, "open by an old header");
    expect(pyps_create(segment, theirs, &c, &out), PYPS_EABI, "create by an old header");
    CHECK(out == (pyps_store *)&out, "a caller of another ABI was written over");
    return 0;
}

/* Opens the segment, after trying to make it. */
static void open_store(void) {
    pyps_tensor tensors[2];
    uint32_t batches[RANKS];
    pyps_config c = some_config(tensors, batches);
    if ((seldom(2) || pyps_create(segment, PYPS_ABI, &c, &s)) && pyps_open(segment, PYPS_ABI, &s)) {
        s = NULL;
        return;
    }
    if (pyps_get_layout(s, &layout) || layout.flat_elements > MOST) close_store();
    else pyps_join(s, PYPS_WORKER, -1, NULL);
}

static int join(void) {
    return pyps_join(s, seldom(12) ? (int)odd() : (int)draw(3), seldom(2) ? (int)odd() : -1, NULL);
}
static int leave(void) { return seldom(4) ? pyps_leave(s) : 0; }
static int rejoin(void) { return pyps_rejoin(s); }
static int close_it(void) { return seldom(10) ? close_store() : 0; }
static int unlink_it(void) { return seldom(6) ? pyps_unlink(segment, (int)draw(2)) : 0; }
static int remove_it(void) { return seldom(6) ? pyps_remove(s) : 0; }

static int reap(void) {
    uint32_t count;
    return pyps_reap(s, &count);
}

static int probe(void) {
    uint64_t bytes;
    return pyps_probe(segment, &bytes);
}

/* ---- a trainer's step ---- */

static int start_soundly(void) {
    pyps_claim claim;
    return pyps_start(s, 0.05, &claim);
}

static int start(void) {
    pyps_claim claim;
    return pyps_start(s, odd_seconds(), &claim);
}

/* A claim that a signal took away is given again to who names the one before; others name none, or what was none. */
static int start_ahead(void) {
    pyps_claim last, lost, again;
    int rc = pyps_start_ahead(s, seldom(3) ? UINT64_MAX : seldom(3) ? draw(99) : 0, &last);
    if (rc || !last.count) return rc;
    if ((rc = pyps_start_ahead(s, last.first, &lost)) || !lost.count) return rc;
    if ((rc = pyps_start_ahead(s, last.first, &again))) return rc;
    CHECK(again.first == lost.first && again.count == lost.count,
          "a claim again: found %" PRIu64 "; expected %" PRIu64, again.first, lost.first);
    return PYPS_OK;
}

static int threads(void) {
    return seldom(4) ? pyps_set_threads(s, seldom(9) ? odd() : 1 + (uint32_t)draw(3), NULL) : 0;
}

static int stage_soundly(void) {
    uint32_t given;
    int rc = pyps_stage(s, 0.05, &given);
    if (rc) return rc;
    float *gradient = pyps_staging(s, staged = given);
    for (uint64_t i = 0; gradient && i < layout.flat_elements; i++) gradient[i] = 0.01f;
    if (gradient && seldom(20)) gradient[draw(layout.flat_elements)] = seldom(2) ? (float)NAN : INFINITY;
    return PYPS_OK;
}

static int stage(void) { return pyps_stage(s, odd_seconds(), &staged); }
static int unstage(void) { return seldom(3) ? pyps_unstage(s, seldom(3) ? odd() : staged) : 0; }

/* Returns how many, in order and apart unless they are odd. */
static uint64_t some_ranges(pyps_range *ranges, bool sound) {
    uint64_t count = 1 + draw(RANGES), from = 0;
    for (uint64_t i = 0; i < count; i++) {
        ranges[i] = (pyps_range){from + draw(200), 1 + draw(200)};
        from = ranges[i].first + ranges[i].count;
    }
    if (!sound && seldom(5)) ranges[0].first = UINT64_MAX - draw(3);
    if (!sound && seldom(8)) ranges[count - 1].count = seldom(2) ? 0 : UINT64_MAX;
    return count;
}

static int staging_parts(void) {
    pyps_range ranges[RANGES];
    some_ranges(ranges, false);
    float *part = pyps_staging_range(s, seldom(4) ? odd() : staged, ranges[0]);
    if (part && ranges[0].count) part[ranges[0].count - 1] = 1;
    uint32_t codec = (uint32_t)draw(7);
    uint64_t bytes = pyps_encoded_bytes(codec, layout.flat_elements - layout.averaged_elements);
    void *own = pyps_staging_codes(s, seldom(4) ? odd() : staged, seldom(5) ? odd() : bytes);
    if (own && bytes && bytes < sizeof codes) memset(own, (int)draw(256), bytes < 64 ? 1 : 64);
    return 0;
}

static void some_hyper(pyps_hyper *hyper, bool sound) {
    for (int group = 0; group < 2; group++) {
        hyper[group] = (pyps_hyper){.lr = 0.1f, .eps = 1e-8f, .beta1 = 0.9f, .beta2 = 0.99f};
        if (seldom(4)) hyper[group].clip_norm = 1;
        if (seldom(4)) hyper[group].momentum = 0.9f;
        if (!sound && seldom(10)) hyper[group].lr = (float)NAN;
        if (!sound && seldom(30)) hyper[group].beta1 = 2;
    }
}

static void spoil(pyps_push_args *a) {
    if (seldom(30)) a->size = odd();
    if (seldom(10)) a->staging = odd();
    if (seldom(10)) a->samples = odd();
    if (seldom(30)) a->scale = (float)NAN;
    if (seldom(8)) a->weighted = 1, a->weight = seldom(4) ? (double)NAN : 3;
    if (seldom(5)) a->encoded = 1;
    if (seldom(5)) a->gradient = values;
    if (seldom(8)) a->base_version = odd();
    if (seldom(8)) a->compute_nanoseconds = seldom(2) ? UINT64_MAX : odd();
    if (seldom(8)) a->cost_nanoseconds = UINT64_MAX;
    if (seldom(8)) a->position = UINT64_MAX;
    if (seldom(10)) a->grad_norm_squared = (double)NAN;
    a->codec = (uint32_t)draw(7), a->nonfinite = (uint32_t)draw(4), a->rounding = (uint32_t)draw(3);
    a->timeout_seconds = odd_seconds();
}

static int push_or_exchange(bool sound) {
    pyps_hyper hyper[2];
    pyps_range ranges[RANGES];
    pyps_push_args a = {.size = sizeof a,
                        .staging = staged,
                        .samples = (uint32_t)draw(5),
                        .scale = 1,
                        .timeout_seconds = 0.05,
                        .hyper = hyper,
                        .seed = draw(UINT64_MAX),
                        .codec = seldom(2) ? PYPS_F32 : (uint32_t)draw(6),
                        .nonfinite = (uint32_t)draw(3),
                        .grad_norm_squared = 1};
    a.error_feedback = a.codec != PYPS_F32 && seldom(2);
    some_hyper(hyper, sound);
    if (seldom(4)) {
        a.range_count = some_ranges(ranges, sound), a.ranges = ranges, a.gradient = values;
        a.codec = PYPS_F32, a.error_feedback = 0;
    }
    if (!sound) spoil(&a);
    pyps_push_result result;
    uint64_t version;
    return seldom(2) ? pyps_exchange(s, &a, flat, &result, &version) : pyps_push(s, &a, &result);
}

static int push_soundly(void) { return push_or_exchange(true); }
static int push(void) { return push_or_exchange(false); }

static int should_continue(void) {
    int advice;
    return pyps_should_continue(s, odd(), odd(), &advice);
}

/* ---- reading ---- */

static int pull(void) {
    uint64_t version;
    return pyps_pull(s, flat, &version);
}

static int pull_ranges(void) {
    pyps_range ranges[RANGES];
    uint64_t version, count = some_ranges(ranges, false);
    return pyps_pull_ranges(s, ranges, count, values, &version);
}

static int pull_encoded(void) {
    uint32_t codec = (uint32_t)draw(7);
    uint64_t bytes = pyps_encoded_bytes(codec, layout.flat_elements - layout.averaged_elements);
    uint64_t version, all = seldom(6) ? odd() % 100 : bytes + 4 * layout.averaged_elements;
    return all > sizeof codes ? 0 : pyps_pull_encoded(s, codec, codes, all, &version);
}

static int snapshot(void) {
    uint64_t version;
    float *const *of = seldom(2) ? NULL : states;
    return pyps_snapshot(s, flat, of, seldom(2) ? NULL : steps, odd_seconds(), &version);
}

static int visit(void *context, uint64_t first, const float *part, uint64_t count) {
    (void)context, (void)first;
    values[0] += part[count - 1];
    return seldom(10) ? 7 : 0;
}

static int read_parts(void) {
    pyps_range ranges[RANGES];
    uint64_t version, count = some_ranges(ranges, false);
    return pyps_read(s, seldom(2) ? NULL : ranges, count, visit, NULL, odd_seconds(), &version);
}

static int read_state(void) {
    pyps_state state;
    pyps_hyper hyper[2];
    int rc = pyps_state_begin(s, odd_seconds(), &state);
    if (rc) return rc;
    rc = pyps_state_read(s, flat, seldom(2) ? NULL : states, seldom(2) ? NULL : steps, hyper);
    if (seldom(3)) pyps_state_residual(s, odd(), values);
    return seldom(8) ? rc : pyps_state_end(s);
}

static int end_state(void) { return pyps_state_end(s); }

static int observe(void) {
    static pyps_member members[64];
    static pyps_rank ranks[64];
    static pyps_rank_cost costs[64];
    uint32_t count;
    pyps_status status;
    pyps_hyper hyper[3];
    pyps_tensor tensor;
    pyps_ticket ticket;
    pyps_policy_params params;
    switch (draw(8)) {
    case 0:
        return pyps_get_status(s, &status);
    case 1:
        return pyps_get_members(s, members, (uint32_t)draw(64), &count);
    case 2:
        return pyps_get_ranks(s, ranks, (uint32_t)draw(10));
    case 3:
        return pyps_get_costs(s, costs, (uint32_t)draw(10));
    case 4:
        return pyps_get_hyper(s, hyper, (uint32_t)draw(3));
    case 5:
        return pyps_get_tensor(s, odd(), &tensor);
    case 6:
        return pyps_get_ticket(s, odd(), &ticket);
    default:
        return pyps_get_policy_params(s, &params);
    }
}

static int wait_for_news(void) { return pyps_wait(s, seldom(2) ? 0 : odd(), 0.01); }

/* ---- steering ---- */

static int limit(void) { return pyps_set_max_samples(s, odd()); }

static int data_set(void) {
    pyps_data_set data = {.size = sizeof data, .length = draw(2), .digest = 1};
    if (seldom(5)) data.mean = (double)NAN;
    if (seldom(5)) data.tolerance = (double)INFINITY;
    return pyps_set_data_set(s, &data);
}

static int cost_model(void) {
    pyps_cost_model model = {seldom(9) ? odd() : (uint32_t)sizeof model, odd(), seldom(5) ? (double)NAN : 0.1,
                             seldom(5) ? -1 : 0.1, 0};
    return pyps_set_cost_model(s, &model);
}

static int replan(void) {
    uint32_t batches[RANKS];
    for (int rank = 0; rank < RANKS; rank++) batches[rank] = seldom(20) ? odd() : (uint32_t)draw(7);
    uint32_t count = seldom(4) ? (uint32_t)draw(RANKS + 1) : layout.ranks;
    return seldom(3) ? pyps_replan(s, batches, count, seldom(3) ? odd() : PYPS_ANY_PLAN) : 0;
}

static int schedule(void) {
    pyps_turn turns[RANKS];
    for (uint32_t k = 0; k < RANKS; k++)
        turns[k] =
            (pyps_turn){.rank = seldom(10) ? odd() : k, .gap_seconds = seldom(10) ? (double)NAN : 0.001};
    uint32_t count = seldom(4) ? (uint32_t)draw(RANKS + 1) : layout.ranks;
    return pyps_set_schedule(s, turns, count, seldom(10) ? (double)NAN : 0.003);
}

static int journaled(void) {
    pyps_replay_result replayed;
    if (seldom(3)) return pyps_journal(s, seldom(3) ? NULL : journal);
    if (seldom(30) && !pyps_replay(journal, &replayed))
        CHECK(!replayed.differences, "replayed: %s", replayed.first);
    return 0; /* others write to the file meanwhile: it may be cut */
}

/* A child must not use what its parent has opened. */
static int fork_child(void) {
    if (!seldom(20)) return 0;
    pid_t child = fork();
    if (!child) {
        pyps_claim claim;
        int rc = pyps_start(s, 0.01, &claim);
        _exit(rc != PYPS_EFORKED || (seldom(2) && pyps_close(s) == PYPS_ECORRUPT));
    }
    int status = 0;
    if (child > 0) waitpid(child, &status, 0);
    CHECK(!status, "a forked child ended with status %x", (unsigned)status);
    return 0;
}

/* ---- */

typedef int (*call)(void);
static const call sound[] = {start_soundly, pull, stage_soundly, push_soundly};
static const call any[] = {
    join,      leave,         rejoin,      close_it,   unlink_it,   remove_it,         reap,
    probe,     start,         stage,       unstage,    push,        staging_parts,     should_continue,
    pull,      pull_ranges,   snapshot,    read_parts, observe,     pull_encoded,      read_state,
    end_state, wait_for_news, limit,       data_set,   replan,      cost_model,        schedule,
    journaled, fork_child,    start_ahead, threads,    close_again, open_by_old_header};

static void make_calls(uint64_t calls) {
    uint64_t next = 0;
    for (uint64_t made = 0; made < calls; made++) {
        if (!s) open_store();
        if (!s) continue;
        bool follows = next || seldom(2);
        int rc = follows ? sound[next]() : any[draw(sizeof any / sizeof *any)]();
        next = follows ? (next + 1) % (sizeof sound / sizeof *sound) : 0;
        CHECK(rc != PYPS_ECORRUPT && rc != PYPS_ESYS, "%s: %s", pyps_error_name(rc), pyps_error_message());
    }
    if (s) close_store();
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: %s SEED CALLS PROCESSES\n", argv[0]), 2;
    uint64_t seed = strtoull(argv[1], NULL, 10), calls = strtoull(argv[2], NULL, 10);
    int processes = atoi(argv[3]), failed = 0;
    snprintf(journal, sizeof journal, "%s/calls.journal",
             getenv("PYPS_SHM_DIR") ? getenv("PYPS_SHM_DIR") : ".");
    for (int p = 0; p < processes; p++)
        if (!fork()) {
            number = 1 + seed * 1000003 + (uint64_t)p * 7919;
            make_calls(calls);
            exit(0);
        }
    for (int status; wait(&status) > 0;) failed |= status != 0;
    pyps_unlink(segment, 1);
    unlink(journal);
    if (!failed) printf("%d times %" PRIu64 " calls: no fault\n", processes, calls);
    return failed;
}
