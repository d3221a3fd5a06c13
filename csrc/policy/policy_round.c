/* policy_round.c: policies that collect several gradients into one step, a round.
 *
 * BSP: a round has the gradient of every worker; while one is away, of a global batch all the same.
 * Backup(k): all but k. A late worker's samples are taken back, and its gradient never enters a later round
 * (Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting distributed synchronous SGD, 2016).
 * n-softsync: any floor(N / n) gradients, each taking 1 / staleness of a step; no worker waits for the round
 * (Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning, IJCAI 2016).
 * H-PS: BSP with batches that are sized again for each round so that all workers finish together. How they
 * are sized is this implementation's choice: the abstract says no more than that.
 */
#include <math.h>

#include "policy/policy.h"

static uint64_t progress(const struct view *v) { return v->round; }

static bool all_staged(struct view *v, uint64_t now) {
    (void)now;
    return !v->outstanding;
}

/* While samples are left, one that has neither a gradient nor samples came after the round was opened: it has no part
 * in it. At the end of the run others have none either, and the round waits as if they had. */
static bool enough_staged(struct view *v, uint64_t now) {
    uint64_t k = (uint64_t)v->policy_params.backup;
    (void)now;
    if (view_samples_left(v)) return v->outstanding <= k;
    return !v->outstanding || v->staged + k >= v->active;
}

/* A round is one part in `splits` of a step by its samples already. */
static float by_staleness(const struct view *v, uint64_t staleness) {
    float whole = v->policy_params.scaling == PYPS_SCALE_NONE ? 1.0f : (float)v->policy_params.splits;
    return staleness ? whole / (float)staleness : whole;
}

/* Whether a worker has claimed samples, and a staging buffer that is not in the open round. */
static bool one_can_come(const struct view *v) {
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        const struct member *m = view_member(v, slot);
        uint32_t staged = 0;
        if (m->state != PYPS_ACTIVE || !m->claim_count) continue;
        for (uint32_t k = 0; k < v->staged; k++) staged += view_pending(v)[k].slot == slot;
        if (staged < v->staging_buffers) return true;
    }
    return false;
}

/* At the end of the run those without samples bring nothing: the others wait for no more than can come. */
static bool split_staged(struct view *v, uint64_t now) {
    (void)now;
    uint32_t wanted = v->active / v->policy_params.splits;
    return v->staged >= (wanted ? wanted : 1) || (!view_samples_left(v) && !one_can_come(v));
}

static bool present(const struct view *v, const struct rank *rank) {
    return rank->slot_plus_1 && view_takes_part(v, view_member(v, rank->slot_plus_1 - 1));
}

/* Until every rank has been timed, its planned batch is its speed, so the first round is the plan's. */
static double speed(const struct rank *rank, bool timed) {
    return timed ? 1 / rank->sample_seconds : rank->total.batch;
}

static bool all_timed(const struct view *v) {
    for (uint32_t r = 0; r < v->ranks; r++)
        if (present(v, view_rank(v, r)) && view_rank(v, r)->sample_seconds <= 0) return false;
    return true;
}

/* Sets ranks that would pass their limit to it, and leaves the rest to the others. False: no rank passed. */
static bool fix_limited(struct view *v, double *samples, double *speeds, bool timed) {
    double left = *samples, sum = *speeds;
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        if (!present(v, rank) || rank->next_batch || !rank->max_samples) continue;
        if (left * speed(rank, timed) / sum <= rank->max_samples) continue;
        rank->next_batch = rank->max_samples;
        *samples -= rank->max_samples, *speeds -= speed(rank, timed);
    }
    return *samples < left;
}

/* A rank with less than `least` samples gets them from the largest batch, as long as that keeps as many. */
static void fill_up(struct rank *rank, struct rank *largest, uint32_t least) {
    if (rank->max_samples && rank->max_samples < least) least = rank->max_samples;
    while (rank->next_batch < least && rank != largest && largest->next_batch > least)
        rank->next_batch++, largest->next_batch--;
}

/* Every rank gets two samples, or one where the model can train on one, while the sum stays; one in any case. */
static void fill_small_batches(struct view *v) {
    uint32_t least = view_samples_single(v) ? 1 : 2;
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r), *largest = view_rank(v, 0);
        if (!present(v, rank)) continue;
        for (uint32_t other = 1; other < v->ranks; other++)
            if (view_rank(v, other)->next_batch > largest->next_batch) largest = view_rank(v, other);
        fill_up(rank, largest, 1), fill_up(rank, largest, least);
        if (!rank->next_batch) rank->next_batch = 1;
    }
}

/* Divides samples in proportion to speed, in whole numbers that add up: rounds the running sum. */
static void divide_samples(struct view *v, double samples, double speeds, bool timed, bool over) {
    double before = 0, assigned = 0;
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        if (!present(v, rank) || (rank->next_batch && !over)) continue;
        before += speed(rank, timed);
        double share = floor(samples * before / speeds + 0.5) - assigned;
        assigned += share;
        rank->next_batch = (uint32_t)policy_whole(over ? rank->next_batch + share : share, UINT32_MAX);
    }
    fill_small_batches(v);
}

/* Divides the global batch among the present ranks: by speed, or for BSP by plan, where others have the samples of
 * ranks that are away; within their memory limits. If every rank is at its limit, the rest is divided over all again. */
static void size_batches(struct view *v) {
    double samples = 0, speeds = 0, all;
    bool by_speed = v->policy == PYPS_HPS, timed = by_speed && all_timed(v);
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        rank->next_batch = 0;
        samples += rank->total.batch;
        if (present(v, rank)) speeds += speed(rank, timed);
    }
    if (speeds <= 0 || (!by_speed && speeds >= samples)) return; /* as planned: none is away */
    all = speeds;
    while (speeds > 1e-9 * all && samples > 0 && fix_limited(v, &samples, &speeds, timed)) continue;
    if (samples < 1) return;
    bool over = speeds <= 1e-9 * all;
    divide_samples(v, samples, over ? all : speeds, timed, over);
}

static int check_softsync(const pyps_policy_params *params) {
    return policy_check_number("splits", params->splits, 1, 1e6);
}

const struct policy policy_bsp = {.name = "bsp",
                                  .assigns_rounds = true,
                                  .stages = true,
                                  .waits_for_round = true,
                                  .closes = all_staged,
                                  .on_open = size_batches,
                                  .progress = progress};
const struct policy policy_backup = {.name = "backup",
                                     .assigns_rounds = true,
                                     .stages = true,
                                     .waits_for_round = true,
                                     .drops_late = true,
                                     .closes = enough_staged,
                                     .progress = progress};
const struct policy policy_softsync = {.name = "softsync",
                                       .check_params = check_softsync,
                                       .stages = true,
                                       .weight = by_staleness,
                                       .closes = split_staged};
const struct policy policy_hps = {.name = "hps",
                                  .assigns_rounds = true,
                                  .stages = true,
                                  .waits_for_round = true,
                                  .overlaps_rounds = true,
                                  .resizes_batches = true,
                                  .closes = all_staged,
                                  .on_open = size_batches,
                                  .progress = progress};
