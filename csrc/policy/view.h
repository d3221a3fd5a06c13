/* view.h: everything that is decided together, and the pure steps that decide it.
 *
 * The view is one small block of plain memory, published by one CAS (view_store.c). An event takes a private
 * copy from view to view'; it reads nothing but the copy and the event, time included, so that the sequence
 * of views can be replayed, and a simulator runs the same functions in place. A lost CAS decides again.
 *
 * Times are nanoseconds of one clock that does not go back, the machine's or a simulator's:
 *
 *   event now      when it is decided: a store asks the clock after it has read the view, and again after a
 *                  lost CAS, so that no time in the view is later
 *   event waited   how long who ticks has been waiting; nobody is fenced before that is the round timeout
 *   view now       that of the last event
 *   view next_deadline       from then on a tick has something to do, though nothing else happens
 *   outcome at     who was told to wait should ask again then, though nothing happens
 *   claim_since    when a member's claim came under way, and seen, its last event that changed the view: one
 *                  of the two is since when it holds others up
 *   ring           since: when the turn began, or its push came; opens: before then no push
 */
#ifndef PYPS_VIEW_H
#define PYPS_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pyps.h"

#define MAX_STAGING_BUFFERS 4u
#define STALE               1 /* not an error: look again */

enum event_kind { /* those of virtual time have the public numbers */
                  EVENT_NONE,
                  EVENT_JOIN = PYPS_ON_JOIN,
                  EVENT_LEAVE = PYPS_ON_LEAVE, /* by itself, or by whoever found it dead */
                  EVENT_REJOIN = PYPS_ON_REJOIN,
                  EVENT_START = PYPS_ON_START, /* claims samples */
                  EVENT_PULL = PYPS_ON_PULL,
                  EVENT_PUSH = PYPS_ON_PUSH, /* admits a ticket, or stages into the round, or skips */
                  EVENT_TICK = PYPS_ON_TICK, /* somebody waited too long: live members that hold others up are
                                                fenced */
                  EVENT_REPLAN = PYPS_ON_REPLAN,
                  EVENT_CHECK = PYPS_ON_CHECK,             /* between micro-batches */
                  EVENT_MAX_SAMPLES = PYPS_ON_MAX_SAMPLES, /* how many samples its memory holds */
                  EVENT_GATE = PYPS_ON_GATE,
                  EVENT_START_AHEAD = PYPS_ON_START_AHEAD, /* claims the samples of the step after this one */
                  EVENT_SNAPSHOT_BEGIN,
                  EVENT_SNAPSHOT_END,
                  EVENT_SNAPSHOT_CANCEL
};

struct event {
    enum event_kind kind;
    uint32_t slot;
    uint64_t now;                       /* nanoseconds */
    uint64_t id;                        /* the member it speaks of; another one in that slot makes it void */
    uint32_t role;                      /* join */
    int32_t rank;                       /* join; -1: any */
    uint32_t pid;                       /* join */
    uint32_t state;                     /* leave: PYPS_LEFT or PYPS_DEAD */
    uint32_t staging;                   /* push */
    uint32_t samples;                   /* push */
    uint64_t version;                   /* pull: what was pulled; push into a round: every chunk holds it */
    uint32_t residual_before, residual; /* push with error_feedback: as struct rank names them; else 0 */
    uint64_t base_version;              /* push: 1 + the version computed on; 0: what was pulled last */
    uint64_t compute_nanoseconds;       /* push: from the claim to the ready gradient, nanoseconds */
    double grad_norm_squared;           /* push: of the gradient; 0: not known */
    uint32_t done, next;                /* check: samples computed, and to come; offer: next */
    uint64_t waited;                    /* tick: how long, nanoseconds */
    uint64_t snapshot;                  /* end, cancel */
    const uint32_t *batches;            /* replan: [ranks] */
};

/* What a step comes to. WAIT: nothing changed, ask again after another event. REFUSED: outcome.code says why.
 */
enum verdict { STEP_COMMIT, STEP_UNCHANGED, STEP_WAIT, STEP_REFUSED };

struct outcome {
    int code;
    uint64_t ticket;    /* push admitted at once, or the one that closed its round */
    uint64_t round;     /* push staged: into this round */
    uint64_t until, at; /* wait: for the policy's progress to be `until`, and the time to be `at` */
    uint64_t staleness;
    float scale;                /* push: the policy's */
    int advice;                 /* check: PYPS_CONTINUE ... */
    int32_t rank;               /* join */
    uint64_t snapshot, version; /* snapshot begin */
    pyps_claim claim;
};

struct member {
    uint64_t id;
    uint32_t state, role;
    int32_t rank;
    uint32_t pid;
    uint64_t clock, pulled_version;
    uint64_t ticket; /* its last gradient went into this one; 0: none yet, or the step was skipped */
    uint64_t claim_first;
    uint64_t claim_since; /* when it was claimed */
    uint64_t seen;        /* its last event that changed the view */
    uint32_t claim_count; /* 0: holds no samples */
    uint32_t begun;       /* 1 once it has been told of its claim */
    uint32_t staged;      /* bit by staging: waits for the round to close */
    uint32_t next_count;  /* the claim after this one, of who works ahead; 0: none */
    uint64_t next_first;
    uint32_t ahead; /* 1: works ahead; where rounds allot samples, it is allotted the next one's too */
    uint32_t reserved;
    uint64_t staging_ticket[MAX_STAGING_BUFFERS]; /* the slot's: last ticket of each staging buffer, whoever
                                                     was in it */
};

struct rank {
    pyps_rank total;
    uint32_t slot_plus_1; /* of its living member; 0: none */
    uint32_t joined;      /* 1 once anybody had it */
    uint32_t residual;    /* where its residual lies: 1 + 2 * slot + which; 0: it has none */
    uint32_t share;       /* samples of its next claim, as the policy has it; 0: the planned batch */
    uint32_t most;        /* samples that its memory holds; 0: no limit */
    uint32_t extra;       /* dssp: steps that it may still go beyond the bound */
    uint32_t absent;      /* r2sp: 1: its turns are passed over until it asks for one */
    uint32_t reserved;
    uint64_t pushed_at, interval;        /* its last push, and from the one before, nanoseconds */
    double step_seconds, sample_seconds; /* from claim to gradient, and that a sample: moving averages */
    double lateness;                     /* saps: staleness for each sample of a claim, a moving average */
};

enum ticket_kind { TICKET_NONE, TICKET_PUSH, TICKET_ROUND };

struct ticket {
    uint64_t number;
    uint32_t slot; /* push: whose staging */
    uint16_t staging, kind;
    uint32_t samples;
    float scale; /* the policy's */
};

struct source {
    uint32_t slot, staging, samples;
    float scale; /* the policy's */
};

struct range {
    uint64_t first, count;
};

struct ring {       /* r2sp */
    uint64_t turn;  /* the turn is rank turn % ranks's; never goes back */
    uint64_t since; /* when it began */
    uint64_t opens; /* a push may not come earlier */
    uint64_t period, gap;
    uint64_t pushed; /* 1: the turn's push is in, the pull after it is not */
};

struct lateness {           /* saps */
    double heard;           /* what a worker with one sample needs to be heard */
    double tracked;         /* the quantile of stalenesses */
    double n, x, y, xx, xy; /* decayed sums over pushes, of x = 1 / samples and y = |g|^2 */
};

/* All that a view is made from. */
struct terms {
    uint32_t participants, ranks, staging_buffers, policy;
    pyps_policy_params policy_params;
    uint64_t samples, round_timeout; /* nanoseconds */
    const uint32_t *batches;         /* [ranks] */
};

/* Followed by member[participants], rank[ranks], ticket[tickets], source[participants] twice: of the last
 * closed round, and of the open one; range[ranges]. */
struct view {
    uint64_t sequence, version, round, plan, now;
    uint32_t participants, ranks, tickets, ranges, policy, staging_buffers;
    uint32_t all_joined, active, outstanding, returned;
    uint32_t staged; /* gradients that wait for the round to close */
    uint32_t at_floor;
    uint64_t floor, ceiling; /* least clock of the active workers, and how many have it; greatest ever */
    uint64_t wake_epoch;     /* changes whenever waiting members should look again, whatever they wait for */
    uint64_t next_deadline;  /* then there is something to do even if nothing happens; 0: no such time */
    pyps_policy_params policy_params;
    uint64_t cursor, limit; /* sample positions */
    uint64_t samples_dropped;
    uint64_t round_timeout; /* nanoseconds */
    uint64_t round_ticket;  /* of the last closed round; 0: all skipped */
    uint32_t round_sources, round_samples;
    uint64_t snapshot, snapshot_version;
    uint64_t snapshot_since; /* when it began */
    uint32_t snapshot_slot, snapshot_active;
    union {
        uint64_t scratch[PYPS_STATE_WORDS]; /* the policy's own words */
        struct ring ring;
        struct lateness late;
    };
    uint32_t event_kind, event_slot;
    uint64_t event_id;
};

size_t view_bytes(uint32_t participants, uint32_t ranks, uint32_t staging_buffers);
struct member *view_member(const struct view *view, uint32_t slot);
struct rank *view_rank(const struct view *view, uint32_t rank);
struct ticket *view_ticket(const struct view *view, uint64_t number); /* its place in the ring */
struct source *view_sources(const struct view *view); /* of the last closed round, in rank order */
struct source *view_pending(const struct view *view); /* of the open one, as they came */
struct range *view_ranges(const struct view *view);

void view_init(struct view *view, const struct terms *terms);

/* The only way a view changes. */
enum verdict view_step(struct view *view, const struct event *event, struct outcome *out);

/* The parts of a step that have files of their own. */
void samples_take(struct view *view, uint32_t slot, uint64_t now);   /* claims up to the rank's batch */
void samples_take_next(struct view *view, uint32_t slot);            /* the claim after the one under way */
bool samples_follow(struct view *view, uint32_t slot, uint64_t now); /* it is now the one under way */
void samples_return(struct view *view, uint32_t slot,
                    uint32_t keep); /* gives back all but the first `keep` of the claim under way */
void samples_forsake(struct view *view, uint32_t slot); /* gives back everything */
bool samples_left(const struct view *view);
void round_settle(struct view *view, uint64_t now); /* closes and opens rounds as far as the policy says */
enum verdict push_step(struct view *view, const struct event *event, struct outcome *out);
enum verdict gate_step(struct view *view, const struct event *event, struct outcome *out);
enum verdict check_step(struct view *view, const struct event *event, struct outcome *out);
/* The least clock, kept up to date: after a worker became active, before it ceases to be, for its step. */
void clock_enters(struct view *view, struct member *member);
void clock_leaves(struct view *view, struct member *member);
void clock_advances(struct view *view, struct member *member);
bool clock_alone(const struct view *view,
                 const struct member *member); /* the slowest: its step moves the floor */

/* False if an index in a view that came from shared memory is out of range. */
bool view_valid(const struct view *view, const struct view *expected);

#endif
