/* policy_r2sp.c: R2SP, round-robin synchronous parallel (Chen, Wang, Li: INFOCOM 2019). Workers update the
 * store in turn, evenly spaced, so that their transfers do not share its link.
 *
 * This implementation: the push is gated, and the pull after it belongs to the same turn. Between two pushes
 * of one worker every other worker pushes once, so staleness is N - 1 however different the workers are. Gaps
 * count from the sending of the last push: a late worker shifts all later turns, which keeps the gaps even and
 * gives it time to catch up. A worker that does not take its turn within `patience` periods is skipped until it asks for a
 * turn again.
 *
 * The period is the slowest worker's cycle: from one push to the next, without its wait for its turn. A
 * schedule sets the order, the gaps and a planned period. Its gaps hold until the measured period is further
 * than TOLERANCE from the planned one; then a cycle takes the measured period, and gaps keep their
 * proportions. If workers are away, those present share the cycle. Without a schedule ranks take turns in
 * their own order, and each gap is period / N. `slack` divides every gap.
 */
#include "policy/policy.h"

/* Nanoseconds; an operating system may delay any process for less than that. */
#define MIN_PATIENCE 1e8
#define CYCLE_WINDOW 32   /* cycles over which a rank's is averaged, after a first one that warms it up */
#define SETTLED      3    /* cycles after which a slower one than planned is not just the first */
#define TOLERANCE    0.05 /* of the planned period */
#define LONGEST      (UINT64_MAX / 4)

/* R2SP's own words of the view: the ring. */
struct round_robin {
    uint64_t turn;            /* is at place turn % ranks of the ring; never goes back */
    uint64_t turn_since;      /* when it began */
    uint64_t push_not_before; /* the earliest time of its push */
    uint64_t period, gap;     /* the slowest cycle measured, and the mean gap kept; 0: none */
    uint64_t pushed;          /* 1: the turn's push has come, the pull after it has not */
    uint64_t cycle;           /* how long a cycle takes if each turn begins after its gap, at slack 1 */
    uint64_t scheduled;       /* ranks whose turn_gap is set: all, or none is */
    uint64_t planned_period;  /* 0: none, or batches have changed since */
    double stretch;           /* scheduled: what the planned gaps are multiplied by */
} __attribute__((may_alias));

/* And of a rank, of the place in the ring that has its number, and of its worker. */
struct place {
    uint32_t skipped;     /* 1: the rank's turns are skipped until it asks for one */
    uint32_t of_rank;     /* its place in the ring */
    uint32_t rank;        /* whose turn is at this place */
    uint32_t cycles;      /* of the rank, how many were measured */
    double cycle_seconds; /* from push to push without the wait for its turn: a moving average */
    uint64_t gap;         /* planned, from the push at this place to the next, nanoseconds */
} __attribute__((may_alias));

_Static_assert(sizeof(struct round_robin) <= sizeof((struct view *)0)->shared_state, "in the view's words");
_Static_assert(sizeof(struct place) <= sizeof((struct rank *)0)->own, "in a rank's words");

static struct round_robin *ring(const struct view *v) {
    return (struct round_robin *)(uintptr_t)v->shared_state;
}
static struct place *own(const struct rank *r) { return (struct place *)(uintptr_t)r->own; }
static struct place *place_at(const struct view *v, uint32_t place) { return own(view_rank(v, place)); }

static struct place *place_on_turn(const struct view *v) {
    return place_at(v, (uint32_t)(ring(v)->turn % v->ranks));
}

static struct rank *rank_on_turn(const struct view *v) { return view_rank(v, place_on_turn(v)->rank); }

static bool is_scheduled(const struct view *v) { return ring(v)->scheduled == v->ranks; }

/* What is known of the cycles of the workers that take turns. */
struct cycles {
    uint32_t present;
    uint32_t least;         /* cycles measured of the one with the fewest */
    double slowest;         /* nanoseconds */
    double gaps, gaps_here; /* the sum of the planned gaps, and of those of the workers present */
};

static struct cycles look_at_cycles(const struct view *v) {
    struct cycles c = {.least = UINT32_MAX};
    for (uint32_t place = 0; place < v->ranks; place++) {
        double gap = (double)place_at(v, place)->gap;
        const struct rank *rank = view_rank(v, place_at(v, place)->rank);
        c.gaps += gap;
        if (!rank->slot_plus_1 || own(rank)->skipped || !rank->total.batch) continue;
        double seconds = own(rank)->cycles ? own(rank)->cycle_seconds : rank->step_seconds;
        c.present++, c.gaps_here += gap;
        if (own(rank)->cycles < c.least) c.least = own(rank)->cycles;
        if (seconds * 1e9 > c.slowest) c.slowest = seconds * 1e9;
    }
    return c;
}

/* The length of a scheduled cycle from now on. One that was measured but once may be shorter later on. */
static uint64_t scheduled_cycle(const struct round_robin *r, const struct cycles *c) {
    double planned = (double)r->planned_period;
    bool known = c->present && c->least;
    bool faster = c->slowest < (1 - TOLERANCE) * planned;
    bool slower = c->least >= SETTLED && c->slowest > (1 + TOLERANCE) * planned;
    if (!known) return r->cycle;
    return faster || slower || !r->planned_period ? r->period : policy_whole(c->gaps, LONGEST);
}

/* Before the first turn and once a cycle: the slowest worker's cycle, and the gaps between turns. */
static void measure_period(struct view *v) {
    struct round_robin *r = ring(v);
    struct cycles c = look_at_cycles(v);
    double turns = v->policy_params.slack * c.present;
    r->period = policy_whole(c.slowest, LONGEST);
    r->cycle = is_scheduled(v) ? scheduled_cycle(r, &c) : r->period;
    r->gap = turns > 0 && c.present > 1 ? policy_whole((double)r->cycle / turns, LONGEST) : 0;
    r->stretch = r->gap && c.gaps_here > 0 ? (double)r->gap * c.present / c.gaps_here : 0;
}

static uint64_t gap_after_turn(const struct view *v) {
    const struct round_robin *r = ring(v);
    return is_scheduled(v) ? policy_whole((double)place_on_turn(v)->gap * r->stretch, LONGEST) : r->gap;
}

static void next_turn(struct view *v) {
    ring(v)->turn++, ring(v)->pushed = 0;
    if (ring(v)->turn % v->ranks == 0) measure_period(v);
}

static void set_deadline(struct view *v) {
    const struct round_robin *r = ring(v);
    uint64_t begins = r->push_not_before > r->turn_since ? r->push_not_before : r->turn_since;
    double patience = v->policy_params.patience * (double)r->period;
    if (patience < MIN_PATIENCE) patience = MIN_PATIENCE;
    bool known = r->period && patience < (double)v->round_timeout;
    v->next_deadline = begins + (known ? (uint64_t)patience : v->round_timeout);
}

static void end_turn(struct view *v, uint64_t now) {
    struct round_robin *r = ring(v);
    r->push_not_before = (r->pushed ? r->turn_since : now) + gap_after_turn(v); /* from push to push */
    next_turn(v);
    r->turn_since = now;
    set_deadline(v);
}

static enum gate_decision gate(struct view *v, const struct event *e, struct outcome *out) {
    struct round_robin *r = ring(v);
    struct member *m = view_member(v, e->slot);
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    if (own(rank)->skipped) {
        own(rank)->skipped = 0, m->pushed_at = 0; /* the time that it was away is no cycle */
        if (rank_on_turn(v) == rank)
            r->turn_since = e->now, set_deadline(v); /* a new deadline, or it would be late at once */
        return GATE_AGAIN;
    }
    if (rank_on_turn(v) == rank && r->pushed) { /* it pushes again without a pull: end that turn */
        end_turn(v, e->now);
        return GATE_AGAIN;
    }
    if (rank_on_turn(v) != rank) {
        uint64_t mine = own(rank)->of_rank, now = r->turn % v->ranks;
        out->until = r->turn + (mine > now ? mine - now : v->ranks - (now - mine));
        return GATE_WAIT;
    }
    out->until = r->turn, out->at = r->push_not_before;
    return e->now < r->push_not_before ? GATE_WAIT : GATE_OPEN;
}

/* A pipelined worker computes while it waits, so its cycle is at least its compute time. */
static void time_cycle(struct view *v, const struct event *e) {
    struct member *m = view_member(v, e->slot);
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    uint64_t interval = m->pushed_at ? e->now - m->pushed_at : 0;
    uint64_t busy = interval > e->waited ? interval - e->waited : 0;
    m->pushed_at = e->now;
    if (!interval) return;
    if (busy < e->compute_nanoseconds) busy = e->compute_nanoseconds;
    double seconds = (double)busy * 1e-9;
    if (own(rank)->cycles < UINT32_MAX) own(rank)->cycles++;
    if (own(rank)->cycles == 1) own(rank)->cycle_seconds = seconds;
    else policy_average(&own(rank)->cycle_seconds, seconds, own(rank)->cycles - 1, CYCLE_WINDOW);
}

static bool on_push(struct view *v, const struct event *e, struct outcome *out) {
    struct round_robin *r = ring(v);
    (void)out;
    time_cycle(v, e);
    if (e->samples) r->pushed = 1, r->turn_since = e->now - (e->sent < e->now ? e->sent : 0), set_deadline(v);
    else end_turn(v, e->now); /* nothing was pushed: do not wait for a pull */
    return true;
}

static void on_pull(struct view *v, const struct event *e) {
    uint32_t slot_plus_1 = rank_on_turn(v)->slot_plus_1;
    if (ring(v)->pushed && slot_plus_1 == e->slot + 1) end_turn(v, e->now);
}

static bool can_take_turn(const struct view *v, const struct rank *rank) {
    if (!rank->slot_plus_1 || own(rank)->skipped) return false;
    const struct member *m = view_member(v, rank->slot_plus_1 - 1);
    return m->claim_count ? m->state == PYPS_ACTIVE : view_takes_part(v, m) && view_samples_left(v);
}

static void after_event(struct view *v, uint64_t now) {
    if (!v->all_joined) return;
    if (!v->next_deadline) measure_period(v), ring(v)->turn_since = now, set_deadline(v);
    if (now >= v->next_deadline && can_take_turn(v, rank_on_turn(v))) own(rank_on_turn(v))->skipped = 1;
    uint64_t before = ring(v)->turn;
    for (uint32_t i = 0; i < v->ranks && !can_take_turn(v, rank_on_turn(v)); i++) next_turn(v);
    if (ring(v)->turn != before || now >= v->next_deadline) ring(v)->turn_since = now, set_deadline(v);
}

/* The first turn of the new order comes next, a gap after the last push. */
static void on_schedule(struct view *v, const struct event *e) {
    struct round_robin *r = ring(v);
    if (r->pushed) end_turn(v, e->now);
    r->turn += (v->ranks - r->turn % v->ranks) % v->ranks;
    for (uint32_t place = 0; place < v->ranks; place++) {
        const pyps_turn *turn = &e->turns[place];
        place_at(v, place)->rank = turn->rank;
        place_at(v, place)->gap = policy_whole(turn->gap_seconds * 1e9, LONGEST / v->ranks);
        place_at(v, turn->rank)->of_rank = place;
    }
    r->scheduled = v->ranks;
    r->planned_period = policy_whole(e->period_seconds * 1e9, LONGEST);
    r->cycle = policy_whole(look_at_cycles(v).gaps, LONGEST);
    if (!v->all_joined) return;
    measure_period(v);
    r->turn_since = e->now, set_deadline(v);
}

/* The ranks that come take their turns after the others; a schedule without them ends. */
static void on_grow(struct view *v, uint32_t ranks, uint64_t now) {
    struct round_robin *r = ring(v);
    if (r->pushed) end_turn(v, now);
    r->turn += (ranks - r->turn % ranks) % ranks;
    r->scheduled = r->planned_period = 0;
}

/* The planned period was that of the former batches. */
static void on_replan(struct view *v) {
    ring(v)->planned_period = 0;
    for (uint32_t r = 0; r < v->ranks; r++) place_at(v, r)->cycles = 0;
}

/* A worker that missed its turn; not one whose gradient is ready and that waits for its turn. */
static bool holds_up(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    (void)now;
    return m->claim_count && place_at(v, (uint32_t)m->rank)->skipped;
}

static uint64_t progress(const struct view *v) { return ring(v)->turn; }

/* As if the worker whose turn it is had pulled. Its times are set anew when all have joined. */
static void detach(struct view *v) {
    struct round_robin *r = ring(v);
    if (r->pushed) next_turn(v);
    r->turn_since = r->push_not_before = 0;
}

/* The ring as it was scheduled. A schedule of another number of ranks ends. */
static int restore_ring(struct view *v, const pyps_state *state) {
    struct round_robin *r = ring(v);
    if (!is_scheduled(v) || state->ranks != v->ranks) {
        r->scheduled = r->planned_period = 0;
        return PYPS_OK;
    }
    for (uint32_t place = 0; place < v->ranks; place++) place_at(v, place)->of_rank = UINT32_MAX;
    for (uint32_t place = 0; place < v->ranks; place++) {
        const pyps_rank_state *from = &state->rank[place];
        if (from->turn_rank >= v->ranks || place_at(v, from->turn_rank)->of_rank != UINT32_MAX)
            return fail(PYPS_EINVAL, "state: rank %u: turn_rank: found %u; expected each of 0 to %u once",
                        place, from->turn_rank, v->ranks - 1);
        place_at(v, place)->rank = from->turn_rank, place_at(v, place)->gap = from->turn_gap;
        place_at(v, from->turn_rank)->of_rank = place;
    }
    return PYPS_OK;
}

static int restore(struct view *v, const pyps_state *state) {
    const struct round_robin *r = ring(v);
    if (!r->turn_since && !r->push_not_before && !r->pushed && r->period <= LONGEST && r->gap <= LONGEST &&
        r->cycle <= LONGEST && r->planned_period <= LONGEST && r->stretch >= 0 && r->stretch <= 1e18)
        return restore_ring(v, state);
    return fail(PYPS_EINVAL,
                "state: policy_state: found period %lu, gap %lu and a turn under way; expected "
                "at most 2^62 nanoseconds each, and none",
                r->period, r->gap);
}

static void on_new_rank(struct rank *rank, uint32_t number) { own(rank)->of_rank = own(rank)->rank = number; }
static void on_join(struct rank *rank) { own(rank)->skipped = own(rank)->cycles = 0; }

static void save_rank(const struct rank *rank, pyps_rank_state *out) {
    out->turn_rank = own(rank)->rank, out->turn_gap = own(rank)->gap;
}

/* The places of the ring, each with a rank that has this place. */
static bool valid(const struct view *v, uint32_t ranks) {
    for (uint32_t place = 0; place < ranks; place++) {
        uint32_t rank = place_at(v, place)->rank;
        if (rank >= ranks || place_at(v, rank)->of_rank != place) return false;
    }
    return true;
}

static void report(const struct view *v, pyps_status *out) {
    out->period_nanoseconds = ring(v)->cycle, out->gap_nanoseconds = ring(v)->gap;
    out->turn_rank = (int32_t)place_on_turn(v)->rank, out->scheduled = is_scheduled(v);
}

static int check_params(const pyps_policy_params *params) {
    int rc = policy_check_number("slack", params->slack, 0, 1e6);
    return rc ? rc : policy_check_number("patience", params->patience, 0.1, 1e6);
}

const struct policy policy_r2sp = {.name = "r2sp",
                                   .uses_turns = true,
                                   .check_params = check_params,
                                   .gate = gate,
                                   .on_push = on_push,
                                   .on_pull = on_pull,
                                   .after_event = after_event,
                                   .detach = detach,
                                   .restore = restore,
                                   .on_new_rank = on_new_rank,
                                   .on_join = on_join,
                                   .save_rank = save_rank,
                                   .valid = valid,
                                   .report = report,
                                   .on_schedule = on_schedule,
                                   .on_grow = on_grow,
                                   .on_replan = on_replan,
                                   .holds_up = holds_up,
                                   .progress = progress};
