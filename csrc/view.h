/* view.h: everything that is decided together, and the pure steps that decide it.
 *
 * The view is one small block of plain memory, published by one CAS (view_store.c). An event takes a private
 * copy from view to view'; it reads nothing but the copy and the event, time included, so that the sequence
 * of views can be replayed, and a simulator runs the same functions in place. A lost CAS decides again.
 */
#ifndef PYPS_VIEW_H
#define PYPS_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pyps.h"

#define MAX_AREAS 4u
#define STALE     1 /* not an error: look again */

enum event_kind {
    EVENT_NONE,
    EVENT_JOIN,
    EVENT_LEAVE, /* by itself, or by whoever found it dead */
    EVENT_REJOIN,
    EVENT_START, /* claims samples */
    EVENT_PULL,
    EVENT_PUSH, /* admits a ticket, or stages into the round, or skips */
    EVENT_TICK, /* somebody waited too long: live members that hold others up are fenced */
    EVENT_REPLAN,
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
    uint32_t area;                      /* push */
    uint32_t samples;                   /* push */
    uint64_t version;                   /* pull: what was pulled; push into a round: every chunk holds it */
    uint32_t residual_before, residual; /* push with feedback: as struct rank names them; else 0 */
    uint64_t waited;                    /* tick: how long, nanoseconds */
    uint64_t snapshot;                  /* end, cancel */
    const uint32_t *batches;            /* replan: [ranks] */
};

/* What a step comes to. WAIT: nothing changed, ask again after another event. REFUSED: outcome.code says why.
 */
enum verdict { STEP_COMMIT, STEP_UNCHANGED, STEP_WAIT, STEP_REFUSED };

struct outcome {
    int code;
    uint64_t ticket; /* push admitted at once */
    uint64_t round;  /* push staged: into this round */
    uint64_t staleness;
    int32_t rank;               /* join */
    uint64_t snapshot, version; /* snapshot begin */
    pyps_claim claim;
};

struct member {
    uint64_t id;
    uint32_t state, role;
    int32_t rank;
    uint32_t pid;
    uint64_t clock, pulled;
    uint64_t ticket; /* its last gradient went into this one; 0: none yet, or the step was skipped */
    uint64_t claim_first;
    uint64_t claim_since; /* when it was claimed */
    uint32_t claim_count; /* 0: holds no samples */
    uint32_t staged;      /* 1: waits for the round to close */
    uint32_t staged_area, staged_samples;
    uint64_t area_ticket[MAX_AREAS]; /* the slot's: last ticket of each staging area, whoever was in it */
};

struct rank {
    pyps_rank total;
    uint32_t slot_plus_1; /* of its living member; 0: none */
    uint32_t joined;      /* 1 once anybody had it */
    uint32_t residual;    /* where its residual lies: 1 + 2 * slot + which; 0: it has none */
    uint32_t reserved;
};

enum ticket_kind { TICKET_NONE, TICKET_PUSH, TICKET_ROUND };

struct ticket {
    uint64_t number;
    uint32_t slot; /* push: whose staging */
    uint16_t area, kind;
    uint32_t samples;
    float scale; /* the policy's */
};

struct source {
    uint32_t slot, area, samples, reserved;
};

struct range {
    uint64_t first, count;
};

/* Followed by member[participants], rank[ranks], ticket[tickets], source[participants], range[ranges]. */
struct view {
    uint64_t sequence, version, round, plan, now;
    uint32_t participants, ranks, tickets, ranges, policy, areas;
    uint32_t opened, active, outstanding, returned;
    uint64_t cursor, limit; /* sample positions */
    uint64_t lost;
    uint64_t round_timeout; /* nanoseconds */
    uint64_t round_ticket;  /* of the last closed round; 0: all skipped */
    uint32_t round_sources, round_samples;
    uint64_t snapshot, snapshot_version;
    uint32_t snapshot_slot, snapshot_active;
    uint64_t scratch[16]; /* the policy's own words */
    uint32_t event_kind, event_slot;
    uint64_t event_id;
};

size_t view_bytes(uint32_t participants, uint32_t ranks, uint32_t areas);
struct member *view_member(const struct view *view, uint32_t slot);
struct rank *view_rank(const struct view *view, uint32_t rank);
struct ticket *view_ticket(const struct view *view, uint64_t number); /* its place in the ring */
struct source *view_sources(const struct view *view);
struct range *view_ranges(const struct view *view);

void view_init(struct view *view, uint32_t participants, uint32_t ranks, uint32_t areas, uint32_t policy,
               uint64_t samples, uint64_t round_timeout, const uint32_t *batches);

/* The only way a view changes. */
enum verdict view_step(struct view *view, const struct event *event, struct outcome *out);

/* The parts of a step that have files of their own. */
void samples_take(struct view *view, uint32_t slot, uint64_t now); /* claims up to the rank's batch */
void samples_return(struct view *view, uint32_t slot,
                    uint32_t keep); /* gives back all but the first `keep` */
bool samples_left(const struct view *view);
void round_settle(struct view *view, uint64_t now); /* closes and opens rounds as far as the policy says */
enum verdict push_step(struct view *view, const struct event *event, struct outcome *out);

/* False if an index in a view that came from shared memory is out of range. */
bool view_valid(const struct view *view, const struct view *expected);

#endif
