/* policy_round.c: gradients that are gathered and make one step together.
 *
 * BSP: everybody's. Backup(k): all but k; who is late has its samples taken back, and its gradient never
 * enters a later round (Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting distributed synchronous SGD, 2016).
 * n-softsync: any floor(N / n), each divided by its staleness; nobody waits for the round (Zhang, Gupta,
 * Lian, Liu: Staleness-aware async-SGD for distributed deep learning, IJCAI 2016). H-PS: everybody's, with
 * tasks that are sized anew for each round so that all end together (ours: the paper's abstracts say no more
 * than that).
 */
#include <math.h>
#include <string.h>

#include "policy/policy.h"

static uint64_t progress(const struct view *v) { return v->round; }

static enum push_decision stage(struct view *v, const struct event *e, struct outcome *out) {
    (void)v, (void)e, (void)out;
    return PUSH_STAGE;
}

static bool everybody_staged(const struct view *v) { return !v->outstanding; }

static bool enough_staged(const struct view *v) {
    return !v->outstanding || v->staged + (uint64_t)v->policy_params.backup >= v->active;
}

static enum push_decision stage_by_staleness(struct view *v, const struct event *e, struct outcome *out) {
    (void)v, (void)e;
    if (out->staleness) out->scale = 1.0f / (float)out->staleness;
    return PUSH_STAGE;
}

static bool split_staged(const struct view *v) {
    uint32_t wanted = v->active / v->policy_params.splits;
    return v->staged >= (wanted ? wanted : 1) || (!v->outstanding && !samples_left(v));
}

static bool present(const struct view *v, const struct rank *rank) {
    return rank->slot_plus_1 && view_member(v, rank->slot_plus_1 - 1)->state == PYPS_ACTIVE;
}

/* Work is measured in planned samples until a rank has been timed, so that the first round is the plan's. */
static double speed(const struct rank *rank, bool timed) {
    return timed ? 1 / rank->sample_seconds : rank->total.batch;
}

static bool all_timed(const struct view *v) {
    for (uint32_t r = 0; r < v->ranks; r++)
        if (present(v, view_rank(v, r)) && view_rank(v, r)->sample_seconds <= 0) return false;
    return true;
}

/* Fixes those at their limit that would pass it; what they leave is the others'. False: nobody passed. */
static bool fix_limited(struct view *v, double *samples, double *speeds, bool timed) {
    double left = *samples, sum = *speeds;
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        if (!present(v, rank) || rank->share || !rank->most) continue;
        if (left * speed(rank, timed) / sum <= rank->most) continue;
        rank->share = rank->most;
        *samples -= rank->most, *speeds -= speed(rank, timed);
    }
    return *samples < left;
}

/* A task has a sample at least, from the largest, or the sum would change. */
static void feed_empty(struct view *v) {
    struct rank *largest = view_rank(v, 0);
    for (uint32_t r = 0; r < v->ranks; r++)
        if (view_rank(v, r)->share > largest->share) largest = view_rank(v, r);
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        if (!present(v, rank) || rank->share) continue;
        rank->share = 1;
        if (largest->share > 1) largest->share--;
    }
}

/* Whole numbers in proportion to speed that add up: each rank takes what the running sum leaves it. */
static void spread(struct view *v, double samples, double speeds, bool timed, bool over) {
    double before = 0, given = 0;
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        if (!present(v, rank) || (rank->share && !over)) continue;
        before += speed(rank, timed);
        double share = floor(samples * before / speeds + 0.5) - given;
        given += share;
        rank->share = (uint32_t)whole(over ? rank->share + share : share, UINT32_MAX);
    }
    feed_empty(v);
}

/* The global batch of the ranks that are here, by speed within their memories; where all are full, the rest
 * is spread over all again, to be computed in micro-batches. */
static void size_tasks(struct view *v) {
    double samples = 0, speeds = 0, all;
    bool timed = all_timed(v);
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        rank->share = 0;
        samples += rank->total.batch;
        if (present(v, rank)) speeds += speed(rank, timed);
    }
    if (speeds <= 0) return;
    all = speeds;
    while (speeds > 1e-9 * all && samples > 0 && fix_limited(v, &samples, &speeds, timed)) continue;
    if (samples < 1) return;
    bool over = speeds <= 1e-9 * all;
    spread(v, samples, over ? all : speeds, timed, over);
}

static int check_softsync(const pyps_policy_params *params) {
    return policy_check_number("splits", params->splits, 1, 1e6);
}

const struct policy policy_bsp = {.name = "bsp",
                                  .assigns_rounds = true,
                                  .stages = true,
                                  .waits_for_round = true,
                                  .on_push = stage,
                                  .closes = everybody_staged,
                                  .progress = progress};
const struct policy policy_backup = {.name = "backup",
                                     .assigns_rounds = true,
                                     .stages = true,
                                     .waits_for_round = true,
                                     .drops_late = true,
                                     .on_push = stage,
                                     .closes = enough_staged,
                                     .progress = progress};
const struct policy policy_softsync = {.name = "softsync",
                                       .check_params = check_softsync,
                                       .stages = true,
                                       .on_push = stage_by_staleness,
                                       .closes = split_staged};
const struct policy policy_hps = {.name = "hps",
                                  .assigns_rounds = true,
                                  .stages = true,
                                  .waits_for_round = true,
                                  .overlaps_rounds = true,
                                  .resizes_batches = true,
                                  .on_push = stage,
                                  .closes = everybody_staged,
                                  .on_open = size_tasks,
                                  .progress = progress};
