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
 * WHICH FILE CALLS WHICH. The files stand on floors. A file calls only files that this list has before it
 * (tests/c/test_layers_c.py):
 *
 *   words         wait, activity, layout, geometry, handle, mapping, places, crew
 *   buffers       slots, journal, view_store, buffers
 *   gradients     ranges, gradient, clip_norm, averaged, look, staging, encoded
 *   apply         arrivals, apply
 *   participants  reap, participant
 *   push          finite, fill, push
 *   pull          pull, exchange, snapshot
 *   stores        contents, segment, status
 *
 * Two parts of the protocol need more than one floor. Who waits for a buffer frees what the dead hold (slots.c), but
 * does not decide that they are gone from the run: their tickets are completed and their samples come back a floor
 * above (reap.c). Apply takes a ticket's gradient as it lies, whichever push has put it there.
 */
#ifndef PYPS_STORE_H
#define PYPS_STORE_H

#include <pthread.h>
#include <sys/types.h>

#include "store/atomics.h"
#include "error.h"
#include "store/failpoint.h"
#include "kernels/kernels.h"
#include "store/layout.h"
#include "policy/policy.h"
#include "policy/view.h"
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
    uint32_t private_view, private_buffer;        /* held by this handle, or NONE */
    uint32_t free_cache[4];                       /* buffers displaced here a short time ago, or NONE */
    uint32_t scan;                                /* where the next search for a free spare starts */
    uint64_t staging_ticket[MAX_STAGING_BUFFERS]; /* last ticket admitted from each staging buffer; 0: none */
    bool staging_taken[MAX_STAGING_BUFFERS];      /* the caller has it, or it waits in a round */
    uint32_t parked; /* bit by staging buffer: it waits in a round, and no call waits for that round */
    uint32_t data_allocated;                       /* bit by staging buffer: they have memory */
    uint64_t codes_allocated[MAX_STAGING_BUFFERS]; /* bytes of each that have memory */
    uint32_t residuals_allocated;                  /* bit by residual of this slot */
    double lookahead;                              /* during a pull or an exchange: in global batches */
    /* This worker's gradient that was applied last, until its staging buffer is written again. ticket 0: none */
    struct {
        uint64_t ticket;
        uint32_t staging;
        float scale;
        double norm; /* of the one staged last, if it is clipped by its norm */
    } own;
    float *chunk_floats; /* [chunk_params] parameters that lie otherwise in their chunk; NULL: none yet */
    float *stream_to;    /* during an exchange: the caller's copy of the parameters */
    a64 *streamed;       /* [chunks] the ticket with which a chunk was copied there */
    uint64_t stream_ticket;
    struct arrivals *arrivals; /* whom to tell of them; NULL: nobody */
    uint32_t threads;          /* that its calls may use, as the caller has said; 0 is 1 */
    struct crew *crew;         /* those that it has; NULL: the caller's alone */
    const pyps_store *helps;   /* this is a hand of that worker's crew; NULL: it is none */
    uint32_t hand, hands;      /* which of how many work on the present call; the caller's is 0 */
    bool in_round; /* round_staging is staged into `round`, and no push has returned its outcome yet */
    uint32_t round_staging;
    pyps_push_result staged; /* what that push knew when it was staged */
    uint64_t round, pulled_version;
    uint64_t turn_opened_at;   /* when await_turn returned for the next push; 0: it was not called */
    uint64_t turn_waited;      /* how long calls have waited for that turn, nanoseconds */
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

/* ---- words ---- */

/* activity.c: shows others what this participant does. `slept`: nanoseconds; `kind`: PYPS_WAITS_START ... */
void activity_joined(pyps_store *s);
void activity_waits(pyps_store *s, uint32_t kind, uint64_t since);
void activity_goes_on(pyps_store *s, uint64_t slept);
uint64_t activity_bytes(const pyps_store *s,
                        uint32_t codec); /* of a whole gradient, or all parameters: no padding */
void activity_pushed(pyps_store *s, uint64_t bytes);
void activity_pulled(pyps_store *s, uint64_t bytes);
void activity_show(const pyps_store *s, uint32_t index, const struct member *m, pyps_member *out);

/* handle.c */
int store_check_usable(pyps_store *s, bool joined); /* PYPS_OK, PYPS_EFORKED or PYPS_EINVAL */
int store_check_worker(pyps_store *s);              /* the same, and that it has joined as a worker */
uint64_t store_deadline(const pyps_store *s, double timeout_seconds); /* of a timeout as in pyps.h */
int store_check_interrupt(void);
struct file file_behind(int fd);
bool file_is_behind(int fd, struct file file);
/* Unless this process has closed it, and maybe opened another one. */
void file_close(int fd, struct file file);
/* Zeros, at an address that no handle has had: a second close cannot be another's. With forks held; NULL: no memory. */
pyps_store *handle_allocate(void);
void handle_free(pyps_store *s); /* its memory; the address stays taken */
void handle_list(pyps_store *s); /* with forks held */
/* Closes its files, and takes it from the list: in one step, or a child forked between would keep the files' locks.
 * False: it was not there. */
bool handle_end(pyps_store *s);
bool handle_is_listed(const pyps_store *s);
void journal_close(pyps_store *s);
void reading_drop(pyps_store *s); /* frees what pyps_state_begin gave; the view is not changed */

/* mapping.c */
int mapping_make(pyps_store *s);
/* Makes this slot's staging buffers private memory of this process, before another worker gets them. */
int mapping_detach_staging(pyps_store *s);
int mapping_renew(pyps_store *s); /* before the handle joins again */
void mapping_end(pyps_store *s);
/* Says on which nodes the first `bytes` of the file get their memory, if PYPS_NUMA does. */
int mapping_spread(const pyps_store *s, uint64_t bytes);
/* Gives a hole of the file memory, as whole huge pages where the system has such ones; PYPS_ENOSPC. */
int segment_allocate(pyps_store *s, uint64_t offset, uint64_t bytes);
/* Makes whole pages of the file holes again, where the file system can. */
void segment_release(pyps_store *s, uint64_t offset, uint64_t bytes);

/* places.c */
/* 0: parameters, if they are floats, 1..: states. Averaged chunks have none. */
float *buffer_floats(const pyps_store *s, uint32_t buffer, uint32_t vector);
uint8_t *buffer_halves(const pyps_store *s, uint32_t buffer); /* parameters, if they are bf16 */
/* `length` parameters from `first` of the chunk: in place, or if they are bf16 in `block`. */
const float *buffer_params(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t first,
                           size_t length, float *block);
struct chunk_header *buffer_header(const pyps_store *s, uint32_t buffer);
struct staging_header *staging_header(const pyps_store *s, uint32_t slot, uint32_t staging);
float *staging_data(const pyps_store *s, uint32_t slot, uint32_t staging);
uint8_t *staging_codes(const pyps_store *s, uint32_t slot, uint32_t staging);
float *staging_scales(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec);
float *residual_at(const pyps_store *s, uint32_t name); /* of a name within the view's bounds */

/* crew.c */
/* Takes chunks by next32_relaxed(next) until none is left, and does its part for each. Doing all again changes nothing. */
typedef int crew_job(pyps_store *hand, a32 *next, const void *what);
/* Lets the crew take part in a job of so many chunks. Every chunk is done, or the error is the caller's own. */
int crew_work(pyps_store *s, uint32_t chunks, crew_job *job, const void *what);
/* One thread more, whose slot `take_slot` finds. */
int crew_add(pyps_store *s, int (*take_slot)(pyps_store *), void (*leave_slot)(pyps_store *));
uint32_t crew_threads(const pyps_store *s);                     /* with the caller's */
void crew_end(pyps_store *s, void (*leave_slot)(pyps_store *)); /* NULL: the segment is not touched */

/* ---- buffers ---- */

/* slots.c */
bool buffer_has_reader(const pyps_store *s, uint32_t buffer);     /* a chunk hazard names it */
bool view_has_reader(const pyps_store *s, uint32_t buffer);       /* a view hazard does */
bool staging_has_reader(const pyps_store *s, uint64_t ticket);    /* a ticket hazard does */
bool residual_has_reader(const pyps_store *s, uint32_t residual); /* a residual hazard does */
void owner_release(a64 *owner_word, uint32_t holder);             /* if it is the holder */
bool slot_is_dead(pyps_store *s, uint32_t slot);
int slot_lock(pyps_store *s, uint32_t slot); /* PYPS_OK, PYPS_EBUSY or PYPS_ESYS */
void slot_unlock(pyps_store *s, uint32_t slot);
/* Locks a dead participant's slot. PYPS_EBUSY: another reclaimer, or a fork of the dead process, has it; or this
 * handle does, for which a second lock would be the same one. */
int slot_lock_dead(pyps_store *s, uint32_t slot, uint64_t id);
void slot_clear(pyps_store *s, uint32_t slot); /* of its hazards and buffers; its lock is held */
/* Names this process as the slot's owner. If it dies from here on, reaping releases the hazards and buffers
 * that it holds as a helper, even before it is a member. */
void slot_sign(pyps_store *s);
/* Releases what the dead pin and hold, without completing their pushes: in a wait for a buffer. */
void slots_release_dead(pyps_store *s);

/* journal.c */
int journal_open(const char *path, int *fd_out); /* to append to; with forks held. Refuses all but journals */
void journal_event(pyps_store *s, const struct event *e, const struct outcome *o, enum verdict verdict,
                   const struct view *v);
int journal_view(const pyps_store *s, const struct view *v); /* with which the journal begins */

/* view_store.c: a copy of the present view for reading, and the commit of an event */
struct view *view_allocate(const pyps_store *s);
int view_draft(pyps_store *s, uint64_t *word); /* s->draft is the present view, with this word, to be read */
/* The same without a hazard, and so without a slot: while other calls of this handle run, too. */
int view_observe(pyps_store *s, struct view *out);
/* Without members, ranks and all else that follows it. */
int view_observe_head(pyps_store *s, struct view *out);
int view_version(pyps_store *s, uint64_t *version);             /* the present one */
const struct view *view_pin(pyps_store *s, uint64_t *word_out); /* NULL: PYPS_ECORRUPT, message set */
void view_unpin(pyps_store *s);
struct event store_event(const pyps_store *s, enum event_kind kind);
/* Decides `e` on the present view, at the present time, which it writes into `e`, until its CAS succeeds. */
int view_commit(pyps_store *s, struct event *e, struct outcome *out, enum verdict *verdict);
int view_commit_only(pyps_store *s, struct event *e); /* of an event whose outcome is its code alone */
uint32_t view_sequence_word(const pyps_store *s);
void view_wait(pyps_store *s, uint32_t seen, uint64_t nanoseconds);
/* Into s->ticket, s->sources and s->snapshot*. TRY_AGAIN: the ring has moved on, so every chunk has that
 * ticket. */
int view_load_ticket(pyps_store *s, uint64_t number);
int view_load_snapshot(pyps_store *s);                         /* s->snapshot* alone */
void store_snapshot_seen(pyps_store *s, const struct view *v); /* the same, of a view that is pinned */
int snapshot_end(pyps_store *s, enum event_kind kind, uint64_t snapshot); /* EVENT_SNAPSHOT_END or _CANCEL */

/* buffers.c */
int buffer_claim(pyps_store *s, uint32_t chunk); /* into s->private_buffer */
void buffer_published(pyps_store *s, uint32_t displaced);
/* Pins the buffer that a chunk's word names; PYPS_ECORRUPT if its index is impossible. */
int chunk_pin(pyps_store *s, uint32_t chunk, uint64_t *word_out);
void chunk_unpin(pyps_store *s);
/* Another participant may be working on what this word shows, from `least` on as done: waits a moment before doing
 * its work. False: it is not done. */
bool wait_for_word(pyps_store *s, const a64 *word, uint64_t least);
void wake_progress(pyps_store *s);

/* ---- gradients ---- */

/* ranges.c */
struct run {
    uint64_t first, end; /* floats of the flat vector */
};
/* That they are in ascending order, apart, and in the flat vector. */
int ranges_check(const pyps_store *s, const char *what, const pyps_range *ranges, uint64_t count);
/* The next floats from `at` on, and before `end`, that are in one of them. False: there are none. */
bool ranges_next(const pyps_range *ranges, uint64_t count, uint64_t at, uint64_t end, struct run *run);
/* Gives the ranges of a flat vector in this slot's staging memory, and puts values there that lie one after the other;
 * NULL: none. */
int ranges_place(pyps_store *s, float *part, const float *values, const pyps_range *ranges, uint64_t count);
/* Says in a staging buffer of which ranges its gradient is; none: of all. */
int ranges_stage(pyps_store *s, uint32_t staging, const pyps_range *ranges, uint64_t count);
bool staging_has(const pyps_store *s, uint32_t slot, uint32_t staging, uint64_t at); /* this float */
/* Of the ticket that was loaded last: whether one of its gradients is of ranges, so that runs begin anywhere, and the
 * next floats that the same of its gradients have, as in ranges_next. */
bool ticket_is_ranged(const pyps_store *s);
bool ticket_next_run(const pyps_store *s, uint64_t at, uint64_t end, struct run *run);

/* gradient.c */
uint32_t staging_codec(const pyps_store *s, uint32_t slot, uint32_t staging); /* or STAGED_SKIP ... */
/* `length` floats from `at` of a staged gradient: in place, or unless it is PYPS_F32 maybe in `block`. */
const float *staging_gradient(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec,
                              uint64_t at, size_t length, float *block);
/* Of this worker's gradient, when every chunk has its ticket: PYPS_EFALSELOOK, or PYPS_OK. */
int falsely_looked(const pyps_store *s, uint32_t staging);
/* Of the ticket that was loaded last: where its constants are, and `length` floats of its gradient from `at` of the
 * flat vector, in place or in `block`. A round's mean is scaled; a push's gradient is not. */
const struct staging_header *ticket_constants(const pyps_store *s);
const float *ticket_gradient(const pyps_store *s, uint64_t at, size_t length, float *block);

/* clip_norm.c */
/* Forgets the sums of squares in a staging buffer that is not admitted yet. */
void norm_reset(const pyps_store *s, uint32_t staging);
/* The same, and sums the gradient of a push that is applied alone. *finite_out: it has no value that is not finite. */
void norm_of_push(pyps_store *s, uint32_t staging, bool *finite_out);
/* Sets s->norm for the ticket that was loaded last. Its hazard is set, and a chunk lacks it. */
void norm_of_ticket(pyps_store *s);
/* What the gradient is multiplied by so that its norm, s->norm, keeps within `clip_norm`. */
float norm_factor(double norm, float clip_norm);

/* averaged.c */
/* Fills step->new from step->old and what the workers have, for a run of an averaged chunk's floats from `at` of the
 * flat vector. */
void averaged_step(const pyps_store *s, const struct step *step, float lr, uint64_t at);

/* look.c */
/* A chunk's values to their place in a flat vector. */
void chunk_put(const pyps_store *s, uint32_t chunk, const float *from, float *flat);
/* The same of a vector of its buffer; zeros if it has no such one. */
void chunk_copy(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t vector, float *flat);
/* All its parameters, in place or in s->chunk_floats. NULL: PYPS_ENOSPC, message set. */
const float *chunk_params(pyps_store *s, uint32_t chunk, uint32_t buffer);
int lookahead_set(pyps_store *s); /* s->lookahead, from the present view */
/* As chunk_copy and chunk_params do, s->lookahead further on; and a run of the chunk, without its unused end. */
void chunk_look(const pyps_store *s, uint32_t chunk, uint32_t buffer, float *flat);
const float *chunk_params_ahead(pyps_store *s, uint32_t chunk, uint32_t buffer);
void chunk_look_run(const pyps_store *s, uint32_t chunk, uint32_t buffer, struct run run, float *to);

/* staging.c */
int staging_check(pyps_store *s, uint32_t staging);    /* that it is one of this worker's */
int staging_allocate(pyps_store *s, uint32_t staging); /* memory for a whole gradient */
int staging_allocate_codes(pyps_store *s, uint32_t staging, uint64_t bytes);
int staging_allocate_averaged(pyps_store *s,
                              uint32_t staging); /* averaged tensors, which are never encoded */
int residual_allocate(pyps_store *s, uint32_t name);
void staging_forget_memory(pyps_store *s); /* the handle knows of none any more */
void staging_give_back(pyps_store *s);     /* all but headers, of buffers that no process reads */
/* Gives up the current step: takes back every staging buffer but those that wait in a round. */
void staging_abandon(pyps_store *s);
/* Of a push that timed out in a round: no call will wait for that round. */
void staging_park(pyps_store *s);

/* encoded.c */
/* Encodes one chunk, whose parameters are `values`; everything else in `flat` is of the whole vector. */
int chunk_encode(const pyps_store *s, uint32_t chunk, const float *values, struct encoding *flat);
/* Encodes args->gradient, or what is in the staging buffer, into its codes; with error_feedback `e` names the residuals
 * from then on. */
int staging_encode(pyps_store *s, const pyps_push_args *args, struct event *e, pyps_push_result *out);

/* ---- apply ---- */

/* arrivals.c */
struct arrivals {
    pyps_arrival arrived;
    void *context;
    uint64_t least;       /* floats of a run that is told, but for the last one */
    uint32_t there, told; /* chunks from the first one on */
    int refused;          /* what `arrived` returned, if not 0: nothing more is told */
};
void arrivals_begin(pyps_store *s, struct arrivals *a); /* nothing is streamed so far */
void chunk_arrived(const pyps_store *s, uint32_t chunk, uint64_t ticket);
bool has_arrived(const pyps_store *s, uint32_t chunk, uint64_t ticket);
void arrivals_tell(pyps_store *s); /* of what there is since the last time, in the caller's thread */
int arrivals_end(pyps_store *s, bool whole); /* all is there if `whole`; what `arrived` refused with */

/* apply.c */
/* Applies the tickets that the chunk lacks, up to `version`. */
int chunk_advance(pyps_store *s, uint32_t chunk, uint64_t version);
/* The same of a part of the chunks: every `parts`th, from `part` on. */
int chunks_advance_part(pyps_store *s, uint64_t version, uint32_t part, uint32_t parts);
/* Brings every chunk to `version`, behind participants that are already at it. `own`: a ticket that no other
 * participant is expected to apply, or 0. */
int chunks_follow(pyps_store *s, uint64_t version, uint64_t own);
int chunks_complete(pyps_store *s, uint64_t version); /* the same, at once if it has been seen before */

/* ---- participants ---- */

/* reap.c */
int member_leave(pyps_store *s, uint32_t slot, uint64_t id, uint32_t state,
                 bool *changed);                       /* PYPS_LEFT, _DEAD */
int slot_reap_dead(pyps_store *s, uint32_t *dead_out); /* every slot whose participant is dead */
struct waiting {
    uint32_t kind;            /* PYPS_WAITS_START ... */
    uint64_t since, deadline; /* nanoseconds; both move on by the time for which this process was stopped */
};
struct waiting waiting_until(uint32_t kind, uint64_t deadline);
/* Sleeps until the view is another one than `seen`, the time `at` has come (0: no such time) or a slice of the
 * deadline has passed. Then reaps the dead, does what the view's next_deadline asks for, and fences late members if
 * the wait has lasted for a round timeout. PYPS_ETIMEDOUT at the deadline, PYPS_EINTR if the process says so. */
int view_wait_for_others(pyps_store *s, struct waiting *waiting, uint32_t seen, uint64_t at);
/* Commits `e`, and waits while the verdict is STEP_WAIT. */
int view_commit_waiting(pyps_store *s, struct event *e, uint32_t kind, uint64_t deadline, struct outcome *out,
                        uint64_t *waited);

/* participant.c */
int participant_leave(pyps_store *s); /* pyps_leave, but the staging buffers stay mapped */

/* ---- push ---- */

/* finite.c */
/* What finite_check is to find finite: values from the chunk `first` on, but for the parts that the caller has looked
 * at. */
struct unseen {
    const float *values;
    uint32_t first;
    const pyps_range *looked;
    uint64_t looked_count;
};
/* PYPS_OK, or PYPS_ENONFINITE. Copies the gradient meanwhile, unless `to` is NULL. */
int finite_check(pyps_store *s, const struct unseen *unseen, float *to);
/* The same of ranges, which lie at their places, or packed one after the other. */
int finite_check_ranges(const pyps_store *s, const float *values, bool packed, const pyps_range *ranges,
                        uint64_t count);
/* The same of codes that have no scales: halves, which may be NaN themselves. Chunks seen whole are not read. */
int finite_check_halves(const pyps_store *s, uint32_t staging, uint32_t codec, const struct unseen *unseen);

/* fill.c */
/* Writes all that apply reads into the staging buffer. Nothing has happened until `e` is committed. */
int staging_fill(pyps_store *s, const pyps_push_args *args, struct event *e, pyps_push_result *out);

/* ---- pull ---- */

/* pull.c */
int pull_record(pyps_store *s, uint64_t version); /* in the view */
/* Copies every chunk but those that an exchange's ticket was streamed with (0: none). *version_out: the oldest. */
int chunks_copy(pyps_store *s, float *flat, uint64_t ticket, uint64_t *version_out);

/* ---- stores ---- */

/* contents.c */
/* Fills a new segment: the config's parameters, and all of `state` unless it is NULL. */
int contents_write(pyps_store *s, const pyps_config *config, const pyps_state *state,
                   const pyps_tensor *tensors, struct view *view);

#endif
