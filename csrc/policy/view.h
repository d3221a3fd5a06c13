/* view.h: everything that is decided together, and the pure steps that decide it.
 *
 * The view is one small block of plain memory, published by one CAS (store/view_store.c). An event turns a
 * private copy of a view into the next view. It reads nothing but that copy and the event, time included. So
 * the sequence of views can be replayed, and a simulator runs the same functions in place. A decision whose
 * CAS is lost is taken again.
 *
 * Times are nanoseconds of one clock that does not go back, the machine's or a simulator's:
 *
 *   event now             when it is decided. A store reads the clock after it has read the view, and again
 *                         after a lost CAS, so no time in the view is later.
 *   event waited          how long the sender of a tick has waited; nothing is fenced before that reaches the
 *                         round timeout. Of a push: how long it has waited for its turn.
 *   view now              the time of the last event
 *   view next_deadline    from then on a tick has work to do, even if nothing else happens
 *   outcome at            a waiting worker asks again at that time, even if nothing happens
 *   claim_since           when a member got its claim; last_event_at: its last event that changed the view.
 *                         One of the two is the time since which it holds others up.
 */
#ifndef PYPS_VIEW_H
#define PYPS_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pyps.h"

#define MAX_STAGING_BUFFERS 8u
#define RESIDUALS_A_SLOT    4u  /* see store/encoded.c */
#define SKETCH              32u /* numbers that a gradient is reduced to: see sketch.c */
#define SHARED_WORDS        33u /* of the store, that a policy may use as it likes and no state has */
#define RANK_WORDS          39u /* of a rank, the same */
#define TRY_AGAIN           1   /* not an error: what was read has changed meanwhile */

/* Events of virtual time have their public numbers. */
enum event_kind {
    EVENT_NONE,
    EVENT_JOIN = PYPS_ON_JOIN,
    EVENT_LEAVE = PYPS_ON_LEAVE, /* by the member itself, or by a process that found it dead */
    EVENT_REJOIN = PYPS_ON_REJOIN,
    EVENT_START = PYPS_ON_START, /* claims samples */
    EVENT_PULL = PYPS_ON_PULL,
    EVENT_PUSH = PYPS_ON_PUSH, /* admits a ticket, or stages into the round, or skips */
    EVENT_TICK = PYPS_ON_TICK, /* a worker waited too long: live members that hold others up are fenced */
    EVENT_REPLAN = PYPS_ON_REPLAN,
    EVENT_CHECK = PYPS_ON_CHECK,             /* between micro-batches */
    EVENT_MAX_SAMPLES = PYPS_ON_MAX_SAMPLES, /* how many samples the worker's memory holds */
    EVENT_GATE = PYPS_ON_GATE,
    EVENT_START_AHEAD = PYPS_ON_START_AHEAD, /* claims the samples of a step after the current one */
    EVENT_SCHEDULE = PYPS_ON_SCHEDULE,       /* sets the turns of the ring */
    EVENT_SNAPSHOT_BEGIN,
    EVENT_SNAPSHOT_END,
    EVENT_SNAPSHOT_CANCEL,
    EVENT_DATA_SET,  /* which data set a worker reads */
    EVENT_COST_MODEL /* what a rank's steps cost, as known before they are measured */
};

struct event {
    enum event_kind kind;
    uint32_t slot;
    uint64_t now;                       /* nanoseconds */
    uint64_t id;                        /* of the member; the event is void if the slot has another one */
    uint32_t role;                      /* join */
    int32_t rank;                       /* join; -1: any */
    uint32_t pid;                       /* join */
    uint32_t state;                     /* leave: PYPS_LEFT or PYPS_DEAD */
    uint32_t staging;                   /* push */
    uint32_t samples;                   /* push */
    uint64_t version;                   /* pull: what was pulled; push into a round: every chunk has it */
    uint32_t residual_before, residual; /* push with error_feedback: as in struct rank; else 0 */
    uint64_t base_version;              /* push: 1 + the version computed on; 0: what was pulled last */
    uint64_t compute_nanoseconds;       /* push: from the claim to the ready gradient */
    double grad_norm_squared;           /* push: of the gradient; 0: not known */
    uint32_t sketched, reserved;        /* push: 1: `sketch` is of the gradient */
    float sketch[SKETCH];               /* push */
    uint32_t done, next;                /* check: samples computed, and to come; max_samples: next */
    uint64_t waited;                    /* tick; push, for its turn: nanoseconds */
    uint64_t snapshot;                  /* end, cancel */
    uint32_t holds_residuals;           /* snapshot begin: its reader reads them too */
    const uint32_t *batches;            /* replan: [count] */
    uint32_t count;                     /* replan, schedule: of batches, or of turns */
    uint32_t grows;                     /* join: the rank may be one that was not planned */
    uint64_t plan_plus_1;               /* replan: 1 + the plan that it replaces; 0: any */
    uint64_t cost_nanoseconds;          /* push: what the step cost its worker; 0: as compute_nanoseconds */
    uint64_t data_nanoseconds;          /* push: of these, for data */
    pyps_cost_model cost_model;
    pyps_data_set data_set; /* data_set */
    const pyps_turn *turns; /* schedule: [count] */
    double period_seconds;  /* schedule */
    uint64_t sent;          /* push in virtual time: nanoseconds since its turn began */
    uint64_t tag[2];        /* push */
    uint64_t after_plus_1;  /* start ahead: 1 + `first` of the last claim it has; 0: all that were given */
    uint32_t given;         /* push: 1: the next three are given, not decided */
    float scale, share, part;
};

/* The result of a step. WAIT: nothing changed, ask again after another event. REFUSED: see outcome.code. */
enum verdict { STEP_COMMIT, STEP_UNCHANGED, STEP_WAIT, STEP_REFUSED };

struct outcome {
    int code;
    uint64_t ticket;  /* of a push that was admitted at once, or that closed its round */
    uint64_t round;   /* push staged: into this round */
    uint64_t samples; /* push that closed its round: of all gradients in it, and how many these were */
    uint32_t sources;
    uint64_t until, at; /* wait: for the policy's progress to be `until`, and the time to be `at` */
    uint64_t staleness;
    float scale;                /* push: the policy's */
    int advice;                 /* check: PYPS_CONTINUE ... */
    int32_t rank;               /* join */
    uint64_t snapshot, version; /* snapshot begin */
    union {
        pyps_claim claim;
        double steps; /* snapshot begin: of the view */
    };
};

static inline enum verdict step_refuse(struct outcome *out, int code) {
    out->code = code;
    return STEP_REFUSED;
}

struct member {
    uint64_t id;
    uint32_t state, role;
    int32_t rank;
    uint32_t pid;
    uint64_t clock, pulled_version;
    uint64_t ticket;        /* that its last gradient went into; 0: none yet, or the step was skipped */
    uint64_t round_samples; /* of a round: of all gradients in it, and how many these were */
    uint64_t round_sources;
    uint64_t claim_first;
    uint64_t claim_since;   /* when it was claimed */
    uint64_t last_event_at; /* its last event that changed the view */
    uint32_t claim_count;   /* 0: holds no samples */
    uint32_t claim_started; /* 1 once its start has returned the claim */
    uint32_t staged;        /* bit by staging buffer: it waits for the round to close */
    uint32_t ahead;         /* claims after this one, of a pipelined worker: see view_ahead */
    uint32_t ahead_started; /* the first of them, which its start_ahead has returned */
    uint32_t wants_ahead;   /* the most that it has asked for: one less than the depth of its pipeline */
    uint64_t pushed_at;     /* its last push since it joined; 0: none */
    uint64_t steps;         /* its pushes since it joined */
    uint64_t staging_ticket[MAX_STAGING_BUFFERS]; /* the slot's: last ticket of each staging buffer */
};

struct rank {
    pyps_rank total;
    uint32_t slot_plus_1; /* of its living member; 0: none */
    uint32_t joined;      /* 1 once a worker has had it */
    uint32_t residual;    /* where its residual is: 1 + RESIDUALS_A_SLOT * slot + which; 0: it has none */
    uint32_t version_residual; /* the same as of the version: without gradients that wait for their round */
    uint32_t held_residual;    /* the same as of the snapshot, which may still read it */
    uint32_t next_batch;       /* samples of its next claim, set by the policy; 0: the planned batch */
    uint32_t max_samples;      /* that its memory holds; 0: no limit */
    uint32_t lags, reserved;   /* how many were measured, for `lag` */
    double lag;                /* steps that others take between its pull and its push: a moving average */
    uint64_t clock;            /* of its last worker, here or in the store that this one goes on from */
    uint64_t pushed_at, interval;        /* its last push, and the time since the one before, nanoseconds */
    double step_seconds, sample_seconds; /* from claim to gradient, of a step and a sample: moving averages */
    uint64_t saved_pushes;               /* of its pushes, those in the last state */
    pyps_data_set data_set;              /* that its workers read; size 0: not known */
    pyps_rank_cost cost;
    uint64_t own[RANK_WORDS]; /* the policy's own */
};

enum ticket_kind { TICKET_NONE, TICKET_PUSH, TICKET_ROUND };

struct ticket {
    uint64_t number;
    uint64_t samples;
    uint32_t slot; /* push: its staging buffer is this slot's */
    uint16_t staging, kind;
    double before; /* steps of the view before it is admitted; afterwards they are before + part */
    float scale;   /* the policy's */
    float share;   /* of averaged tensors' way from the store's values to the workers' */
    float part;    /* of an optimizer step, that it takes */
    uint32_t reserved;
    uint64_t tag[2]; /* push: the event's */
};

struct source {
    uint32_t slot, staging, samples;
    float scale;               /* the policy's */
    uint64_t first, staleness; /* of the claim, and of the gradient */
};

struct range {
    uint64_t first, count;
};

/* What a view is made from. */
struct view_config {
    uint32_t participants, ranks, staging_buffers, policy;
    pyps_policy_params policy_params;
    uint64_t samples, round_timeout; /* nanoseconds */
    const uint32_t *batches;         /* [ranks] */
};

/* Followed by member[participants], ticket[tickets], source[participants] twice (of the last closed round, and of the
 * open one), range[ranges], range[max_ahead] for each participant, and rank[ranks] with room for as many as
 * participants. */
struct view {
    uint64_t sequence, version, round, plan, now;
    double steps; /* optimizer steps admitted since the store was made, parts of them counted as such */
    uint32_t participants, ranks, tickets, ranges, policy, staging_buffers;
    uint32_t max_ahead, reserved; /* claims ahead that a member may have: fewer than staging buffers */
    uint32_t all_joined, active;
    uint32_t outstanding;   /* members that hold samples */
    uint32_t returned;      /* ranges to assign again */
    uint32_t staged;        /* gradients that wait for the round to close */
    uint32_t at_min_clock;  /* active workers whose clock is min_clock */
    uint64_t min_clock;     /* least clock of the active workers */
    uint64_t max_clock;     /* greatest clock that any worker has had */
    uint64_t wake_epoch;    /* changes whenever waiting members must look again */
    uint64_t next_deadline; /* a tick then has work to do even if nothing happens; 0: no such time */
    pyps_policy_params policy_params;
    uint64_t cursor, limit; /* sample positions */
    uint64_t samples_dropped;
    uint64_t round_timeout; /* nanoseconds */
    uint64_t round_ticket;  /* of the last closed round; 0: all skipped */
    uint64_t round_samples;
    uint32_t round_sources, padding;
    uint64_t snapshot, snapshot_version;
    uint64_t snapshot_since; /* when it began */
    uint32_t snapshot_slot, snapshot_active;
    uint64_t shared_state[PYPS_STATE_WORDS]; /* the policy's own */
    uint64_t shared_own[SHARED_WORDS];       /* the policy's own, which begins anew with each store */
    uint32_t event_kind, event_slot;
    uint64_t event_id;
};

/* sketch.c: adds `count` values of a gradient to its sketch. first: their number in the gradient, a multiple of SKETCH */
void sketch_add(float *sketch, const float *values, uint64_t first, uint64_t count);

/* view_parts.c */
size_t view_bytes(uint32_t participants, uint32_t staging_buffers); /* room for a view */
size_t view_used_bytes(const struct view *view);                    /* of that, up to its last rank */
struct member *view_member(const struct view *view, uint32_t slot);
struct rank *view_rank(const struct view *view, uint32_t rank);
struct ticket *view_ticket(const struct view *view, uint64_t number); /* its place in the ring of tickets */
struct source *view_sources(const struct view *view); /* of the last closed round, in rank order */
struct source *view_pending(const struct view *view); /* of the open round, in order of arrival */
struct range *view_ranges(const struct view *view);
struct range *view_ahead(const struct view *view, uint32_t slot); /* its claims after the current one */

/* Do the sizes of its parts follow from its participants and staging buffers? */
bool view_sized(const struct view *view);
/* Makes the sizes of an empty view: all but its ranks, of which there are none. */
void view_clear(struct view *view, const struct view_config *config);
bool view_takes_part(const struct view *view, const struct member *member); /* active, its rank has samples */

/* view_samples.c */
void view_samples_claim(struct view *view, uint32_t slot, uint64_t now); /* up to the rank's batch */
void view_samples_claim_ahead(struct view *view, uint32_t slot); /* after the last claim; there is room */
/* The first claim ahead becomes the current one. False: there is none. */
bool view_samples_start_next(struct view *view, uint32_t slot, uint64_t now);
/* Gives back all but the first `keep` samples of the current claim. */
void view_samples_return(struct view *view, uint32_t slot, uint32_t keep);
void view_samples_release_all(struct view *view, uint32_t slot); /* gives back every claim */
bool view_samples_left(const struct view *view);
/* Whether the model can train on one sample: a rank is planned to. With batch normalization a model cannot. */
bool view_samples_single(const struct view *view);
/* What a member holds: of its current step (claim 0) and of those after it; count 0: nothing. */
struct range view_samples_claimed(const struct view *view, uint32_t slot, uint32_t claim);

/* view_clocks.c: keeps min_clock right. */
void view_clock_enter(struct view *view, struct member *member);   /* after it became active */
void view_clock_leave(struct view *view, struct member *member);   /* before it stops being active */
void view_clock_advance(struct view *view, struct member *member); /* after a step */
void view_clock_find_min(struct view *view);                       /* once all have joined */
/* min_clock once this member's has come to `clock`. */
uint64_t view_clock_min_after(const struct view *view, const struct member *member, uint64_t clock);

#endif
