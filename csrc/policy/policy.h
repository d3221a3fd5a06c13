/* policy.h: a policy is a row: what it waits for, its gate, its weight, what it asks of workers, in flags and small
 * pure functions on the view. To add one, write a file with its row, and name the row in POLICIES. Neither the store
 * nor the simulator knows policies by name.
 *
 * What a policy keeps of its own lies in words of the view that its file lays out: view->shared_state and shared_own
 * of the store, rank->own of each rank. They are 0 at first; the first of the three are part of a state.
 *
 * A function may change the view it is given only if its answer is followed by a commit. If it answers WAIT,
 * it must leave the view as it was.
 *
 * FLOORS, each with a header that includes the one below; a file includes its own floor's:
 *
 *   view.h       sketch, view_parts, view_clocks, view_samples
 *   policy.h     saps_noise, saps_bound, policy_*, policy
 *   decisions.h  config, view_ranks, view_round, view_valid, view
 *   runs.h       view_state, core, replay
 */
#ifndef PYPS_POLICY_H
#define PYPS_POLICY_H

#include "error.h"
#include "policy/view.h"

enum start_decision { START_GO, START_WAIT };
/* AGAIN: the view has changed; ask again at once. */
enum gate_decision { GATE_OPEN, GATE_WAIT, GATE_AGAIN };

struct policy {
    const char *name;
    bool assigns_rounds;  /* samples are assigned to all ranks when a round opens; else at each start */
    bool stages;          /* gradients are staged into a round */
    bool waits_for_round; /* a worker that has staged continues when its round has closed */
    bool overlaps_rounds; /* with waits_for_round: the next step may be computed meanwhile */
    bool drops_late;      /* a round that closes without a worker takes the worker's samples back */
    bool merges_late;     /* the worker goes on, and comes into the round that is open then */
    bool uses_turns;      /* a pull follows each push, and the turn passes with it */
    bool starts_at_once; /* no start waits for others: what a worker pulls at its push serves its next step */
    bool resizes_batches; /* claims follow the measured speed of each rank */
    /* What workers must send along. NULL: not needed under any parameters. `params` NULL: any parameters. */
    bool (*needs_grad_norm)(const pyps_policy_params *params);
    /* Whether a push comes with a sketch of its gradient. NULL: not under any parameters. */
    bool (*needs_sketch)(const pyps_policy_params *params);
    /* PYPS_OK, or PYPS_EINVAL with the parameter that is out of range. NULL: nothing to check. */
    int (*check_params)(const pyps_policy_params *params);
    /* May this member, for which there are samples, start a step now (START), or the step after the current
     * one as soon as that is done (START_AHEAD)? NULL: always. */
    enum start_decision (*on_start)(struct view *view, const struct event *event, struct outcome *out);
    /* May a ready gradient be sent now? NULL: at once. */
    enum gate_decision (*gate)(struct view *view, const struct event *event, struct outcome *out);
    /* What a gradient of this staleness is multiplied by. NULL: 1. */
    float (*weight)(const struct view *view, uint64_t staleness);
    /* A gradient has arrived; out->staleness and out->scale, its weight, are known. False: it is refused. NULL: every
     * one is taken. */
    bool (*on_push)(struct view *view, const struct event *event, struct outcome *out);
    /* A member has pulled. NULL: nothing to do. */
    void (*on_pull)(struct view *view, const struct event *event);
    /* Between micro-batches: PYPS_CONTINUE ... NULL: always continue. */
    int (*on_check)(struct view *view, const struct event *event);
    /* After every event, if a gradient is staged: does the open round close now? May set view->next_deadline. */
    bool (*closes)(struct view *view, uint64_t now);
    /* A round opens: sets how many samples each rank gets. NULL: the planned batches. */
    void (*on_open)(struct view *view);
    /* After every event: changes the view further, and sets view->next_deadline. */
    void (*after_event)(struct view *view, uint64_t now);
    /* A state is taken: ends what belongs to members in the policy's own state. NULL: nothing does. */
    void (*detach)(struct view *view);
    /* PYPS_OK, or PYPS_EINVAL if the policy's own state in a restored view is impossible; takes what else belongs
     * to it from the state. NULL: any is possible. */
    int (*restore)(struct view *view, const pyps_state *state);
    /* Sets the turns, as given by the event. NULL: the policy has none. */
    void (*on_schedule)(struct view *view, const struct event *event);
    /* A rank is new, or a worker takes it: its own words. NULL: nothing to do. */
    void (*on_new_rank)(struct rank *rank, uint32_t number);
    void (*on_join)(struct rank *rank);
    /* What a state has of a rank's own words. NULL: nothing. */
    void (*save_rank)(const struct rank *rank, pyps_rank_state *out);
    void (*restore_rank)(struct rank *rank, const pyps_rank_state *from);
    /* False: the policy's own words name what there is not, in a view from shared memory of so many ranks. */
    bool (*valid)(const struct view *view, uint32_t ranks);
    /* What a status shows of them. NULL: nothing. */
    void (*report)(const struct view *view, pyps_status *out);
    /* The store will have `ranks` ranks, more than now. NULL: nothing to do. */
    void (*on_grow)(struct view *view, uint32_t ranks, uint64_t now);
    /* Planned batches have changed. NULL: nothing to do. */
    void (*on_replan)(struct view *view);
    /* Can others be waiting for this member to act? NULL: while it has samples. */
    bool (*holds_up)(const struct view *view, uint32_t slot, uint64_t now);
    /* The counter that waiting members wait for; never goes back. NULL: 0. */
    uint64_t (*progress)(const struct view *view);
};

/* The rows, with the numbers by which stores and states know them. */
#define POLICIES(row)                                                                                        \
    row(bsp, PYPS_BSP) row(asp, PYPS_ASP) row(backup, PYPS_BACKUP) row(softsync, PYPS_SOFTSYNC)              \
        row(ssp, PYPS_SSP) row(dssp, PYPS_DSSP) row(dynsgd, PYPS_DYNSGD) row(saps, PYPS_SAPS)                \
            row(r2sp, PYPS_R2SP) row(hps, PYPS_HPS) row(custom, PYPS_CUSTOM) row(quorum, PYPS_QUORUM)

#define DECLARE_ROW(name, number) extern const struct policy policy_##name;
POLICIES(DECLARE_ROW)
#undef DECLARE_ROW

/* A whole number of at most `max` from any float, even one of a damaged view. */
static inline uint64_t policy_whole(double x, uint64_t max) {
    return x > 0 ? x < (double)max ? (uint64_t)x : max : 0;
}

/* The mean of all values at first, then of about the last `window`. `count` includes the newest. */
static inline void policy_average(double *mean, double newest, uint64_t count, uint64_t window) {
    *mean =
        *mean > 0 ? *mean + (newest - *mean) / (double)(count && count < window ? count : window) : newest;
}

static inline int policy_check_number(const char *name, double found, double low, double high) {
    if (found >= low && found <= high) return PYPS_OK;
    return fail(PYPS_EINVAL, "policy_params: %s: found %g; expected %g to %g", name, found, low, high);
}

/* policy.c */
const struct policy *policy_find(uint32_t number); /* NULL if unknown */
/* PYPS_OK, PYPS_EPOLICY, or PYPS_EINVAL with the parameter that is out of range. */
int policy_check(uint32_t number, const pyps_policy_params *params);

#endif
