/* store.h: a process's handle on a segment. Internal; users see an opaque pyps_store.
 *
 * THE PROTOCOL, in one page.
 *
 * Everything that must be decided together is in the view (policy/view.h), a small block that is copied,
 * changed and published by one CAS (view_store.c). Everything large is in chunk buffers and staging buffers.
 *
 *   push    A worker fills one of its staging buffers. One CAS on the view admits it: the push has the next
 *           ticket and will be applied, by its owner or by any other participant. Before that CAS the push
 *           has not happened.
 *   apply   Every chunk applies tickets in order (apply.c). A chunk's word is {last ticket, buffer}. To apply
 *           ticket k: read the word at k - 1, set a hazard on its buffer, write parameters and state into a
 *           private spare, CAS the word to {k, spare}. A participant that loses that CAS finds the ticket
 *           applied; nothing is done twice. So the parameters depend on the order of admission alone.
 *   clip    Where a gradient's norm is bounded, a participant finds the norm over all chunks before it applies one
 *           (clip_norm.c): chunk by chunk, in words of the staging buffer, so that every helper finds the same.
 *   help    A participant that needs a chunk at a later ticket applies the missing tickets itself, from their
 *           staging buffers. A staging buffer does not change from admission until every chunk has its ticket
 *           and no ticket hazard names it. It carries all that apply reads, so the settings of the helper do
 *           not matter.
 *   pull    Hazard, copy, clear, chunk by chunk (pull.c). A chunk is never torn: a published buffer does not
 *           change.
 *   reuse   A buffer is free when no participant holds it, no chunk's word and no live snapshot names it, and
 *           no hazard does (buffers.c). Each participant pins at most one buffer by its hazard and holds at
 *           most one in private. It brings two before it is a member or helps, so any number of them may stop or
 *           die at once, and each of the others still finds a buffer.
 *   threads A worker's process may apply with several threads (crew.c). Each has a slot, hazards and spares of its own:
 *           it is one more participant that helps, without a member in the view.
 *   death   A participant is dead when its lock byte is free or its process is gone (slots.c). Its
 *           admitted pushes are completed, its claims returned, its buffers released (reap.c). A *stopped* process is
 *           not dead: it keeps its buffers. If it delays a round it is fenced: its next admission is refused.
 *
 * What may be out of date, and why that does no harm: the cache of free buffers (a claim checks them), the
 * cached ticket (tickets do not change), a pinned view (its CAS is lost, and with it the decision), marks of
 * waiters (one wake-up too many, or one slice of waiting too long).
 *
 * FLOORS. Each floor has a header, which declares what its files offer and includes the floor below. A file includes
 * its own floor's header, so the compiler refuses a call upwards:
 *
 *   store.h         this page, the handle; wait.h, layout.h
 *   segment.h       activity, geometry, handle, mapping, places, crew
 *   buffers.h       slots, journal, view_store, buffers
 *   gradients.h     ranges, gradient, clip_norm, averaged, look, staging, encoded
 *   apply.h         arrivals, apply
 *   participants.h  reap, participant
 *   push.h          finite, fill, push
 *   pull.h          pull, exchange, snapshot
 *   stores.h        contents, segment, status
 *
 * Two parts of the protocol need more than one floor. Who waits for a buffer frees what the dead hold (slots.c), but
 * does not decide that they are gone from the run: their tickets are completed and their samples come back a floor
 * above (reap.c). Apply takes a ticket's gradient as it lies, whichever push has put it there.
 */
#ifndef PYPS_STORE_H
#define PYPS_STORE_H

#include <pthread.h>
#include <sys/types.h>

#include "store/failpoint.h"
#include "kernels/kernels.h"
#include "store/layout.h"
#include "policy/runs.h"
#include "store/wait.h"
#include "store/words.h"

#define BLOCK 1024u /* floats at a time: what is decoded or reduced stays in the first-level cache */
#define WAIT_SLICE_NANOSECONDS UINT64_C(50000000)  /* how often a waiter looks for the dead */
#define STOP_NANOSECONDS       UINT64_C(100000000) /* a sleep that lasts so much longer was a stop */
#define STALL_NANOSECONDS      UINT64_C(500000)    /* a predecessor that takes longer on a chunk is helped */
#define MOST_THREADS           64u
#define SNAPSHOT_GRACE_SECONDS 1.0 /* a pusher without spares for so long cancels the snapshot */

/* What a descriptor leads to, until this process closes it: then another file may get its number. */
struct file {
    dev_t device;
    ino_t inode;
};

struct pyps_store {
    int fd;
    struct file file;
    pid_t process; /* that may use the handle; 0 in a forked child */
    uint8_t *base;
    uint64_t detached_from, detached_to; /* of the mapping: staging buffers given up; 0: none */
    struct detached {                    /* such parts of earlier mappings */
        uint8_t *start;
        uint64_t bytes;
        struct detached *next;
    } *detached;
    struct geometry geometry; /* local copies, against which values from shared memory are checked */
    struct layout layout;
    struct view *expected; /* a view with the right sizes and policy */
    struct view *draft;    /* private memory in which events are decided: what is in the segment may change */
    uint64_t draft_word;   /* of the view that it is, while `drafted` */
    bool drafted;
    const struct policy *policy;
    bool looks_at_gradients; /* its policy does: pushes are sketched */
    pyps_tensor *tensors;    /* [geometry.tensors] as checked at attach */
    char *path;              /* of the name under which it was created or opened */

    struct header *header; /* into the segment */
    struct slot *slots;
    a64 *words, *saved, *owners, *view_owners;

    struct chunk {
        uint32_t group, length;
        bool averaged;
    } *chunks;        /* [geometry.chunks] derived at attach */
    uint64_t trained; /* elements of the flat vector; averaged ones follow them */

    uint32_t slot; /* NONE: not joined */
    uint64_t id;
    uint32_t reclaims;   /* the dead participant's slot whose lock this handle holds, or NONE */
    uint32_t found_dead; /* members whose slot this handle took over, since the last pyps_reap began */
    int role, rank;
    uint32_t private_view, private_buffer; /* held by this handle, or NONE */
    uint32_t free_cache[4];                /* buffers displaced here a short time ago, or NONE */
    uint32_t scan;                         /* where the next search for a free spare starts */
    struct own_staging {
        uint64_t ticket;          /* the last one admitted from it; 0: none */
        uint64_t codes_allocated; /* bytes of its codes that have memory */
        bool data_allocated;      /* the floats have memory */
        bool taken;               /* the caller has it, or it waits in a round */
    } own_staging[MAX_STAGING_BUFFERS];
    uint32_t parked; /* bit by staging buffer: it waits in a round, and no call waits for that round */
    uint32_t residuals_allocated; /* bit by residual of this slot */
    double lookahead;             /* during a pull or an exchange: in global batches */
    /* This worker's gradient that was applied last, until its staging buffer is written again. ticket 0: none */
    struct {
        uint64_t ticket;
        uint32_t staging;
        float scale;
        double norm; /* of the one staged last, if it is clipped by its norm */
    } own;
    float *chunk_floats; /* [chunk_params] parameters that lie otherwise in their chunk; NULL: none yet */
    struct {             /* during an exchange */
        float *to;       /* the caller's copy of the parameters */
        a64 *marks;      /* [chunks] the ticket with which a chunk was copied there */
        uint64_t ticket;
        struct arrivals *arrivals; /* whom to tell of them; NULL: nobody */
    } stream;
    uint32_t threads;        /* that its calls may use, as the caller has said; 0 is 1 */
    struct crew *crew;       /* those that it has; NULL: the caller's alone */
    const pyps_store *helps; /* this is a hand of that worker's crew; NULL: it is none */
    uint32_t hand, hands;    /* which of how many work on the present call; the caller's is 0 */
    struct {
        bool pending; /* `staging` is staged into it, and no push has returned its outcome yet */
        uint32_t staging;
        uint64_t number;
        pyps_push_result staged; /* what that push knew when it was staged */
    } round;
    struct {
        uint64_t opened_at; /* when await_turn returned for the next push; 0: it was not called */
        uint64_t waited;    /* how long calls have waited for it, nanoseconds */
    } turn;                 /* of the next push */
    uint64_t pulled_version;
    uint64_t claimed_at;       /* when start returned the current claim, or the push before it was taken */
    uint64_t complete_version; /* every chunk has been seen at this version or later */

    struct ticket ticket; /* the last one read, with the view's snapshot at that time */
    struct source *sources;
    uint32_t source_count;
    uint64_t snapshot, snapshot_version;
    bool snapshot_active;
    uint64_t norm_ticket; /* whose gradient has this norm; 0: none */
    double norm;

    struct view *begun; /* NULL, or where view_commit copies the views that it publishes */
    struct reading {    /* a state between its begin and its end: one block of memory; NULL: none */
        uint64_t snapshot, version;
        double taken;           /* steps, by the view */
        pyps_rank_state *ranks; /* [max_participants] */
        pyps_range *ranges;
        uint32_t *residuals; /* [max_participants] as in struct rank */
    } *reading;

    int journal; /* descriptor of the file of its events; -1: none */
    struct file journal_file;

    pyps_store *next; /* list of open handles, for fork */
};

static inline uint64_t store_elements(const pyps_store *s) {
    return (uint64_t)s->geometry.chunks * s->geometry.chunk_params;
}

/* The same part of a pinned view as of the expected one: where it is follows from sizes that no other process can
 * change. What it holds may change at any time if the segment is hostile: read a value once, then check it. */
static inline const void *part_of_view(const pyps_store *s, const struct view *v, const void *of_expected) {
    return (const char *)v + ((const char *)of_expected - (const char *)s->expected);
}
static inline const struct member *pinned_member(const pyps_store *s, const struct view *v, uint32_t slot) {
    return part_of_view(s, v, view_member(s->expected, slot));
}
/* Ranks only become more, and there is room for one of each participant. */
static inline uint32_t pinned_ranks(const pyps_store *s, const struct view *v) {
    uint32_t ranks = *(const volatile uint32_t *)&v->ranks;
    return ranks < s->geometry.max_participants ? ranks : s->geometry.max_participants;
}
static inline const struct rank *pinned_rank(const pyps_store *s, const struct view *v, uint32_t rank) {
    return part_of_view(s, v, view_rank(s->expected, rank));
}

static inline bool chunk_has_halves(const pyps_store *s, uint32_t chunk) {
    return s->geometry.master == PYPS_BF16 && !s->chunks[chunk].averaged;
}
static inline uint32_t chunk_states(const pyps_store *s, uint32_t chunk) {
    return s->chunks[chunk].averaged ? 0 : s->layout.states;
}

/* The slot of the worker for which the handle works: its own, or that of the handle whose hand it is. */
static inline uint32_t worker_slot(const pyps_store *s) { return s->helps ? s->helps->slot : s->slot; }

static inline uint32_t holder_of(const pyps_store *s) { return s->slot + 1; }

#endif
