/* store.h: a process's handle on a segment. Internal; users see an opaque pyps_store.
 *
 * THE PROTOCOL, in one page.
 *
 * Everything that must be decided together is in the view (view.h), a small block that is copied, changed and
 * published by one CAS (view_store.c). Everything bulky is in chunk buffers and staging buffers.
 *
 *   push   A worker fills a staging buffer of its own. One view CAS admits it: the push has the next ticket
 * and will be applied, by its owner or by anyone else. Before that CAS it never happened. apply  Every chunk
 * applies tickets in order (apply.c). A chunk's word is {last ticket, buffer}. To apply ticket k: see the
 * word at k - 1, hazard its buffer, write parameters and state into a private spare, CAS the word to {k,
 * spare}. Whoever loses that CAS finds the ticket applied; nothing is done twice. Parameters are therefore a
 * function of the order of admission alone. help   Who needs a chunk that is behind applies the missing
 * tickets itself from their staging. A staging staging is immutable from admission until every chunk holds
 * its ticket and no ticket hazard names it. It carries all that apply reads, so the helper's own settings
 * never matter. pull   Hazard, copy, clear, chunk by chunk (pull.c). Never torn: a published buffer is
 * immutable. reuse  A buffer is free when nobody holds it, neither its chunk's word nor a live snapshot names
 * it, and no hazard does (buffers.c). With two spares a participant somebody's stop or death delays no one:
 * each participant pins at most one buffer by its hazard and holds at most one in private. death  A
 * participant is dead when its lock byte is free or its process is gone (participant.c). Its admitted pushes
 * are completed, its claims returned, what it held released. A *stopped* process is not dead: it keeps its
 * buffers, and if it delays a round it is fenced: its next admission is refused.
 *
 * What may be stale, and why that is harmless: hints of free buffers (a claim checks), the cached ticket
 * (tickets are immutable), a pinned view (a decision on it is thrown away by the lost CAS), waiter counts (a
 * wake-up too many, or a slice of the deadline lost).
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

#define WAIT_SLICE_NANOSECONDS UINT64_C(50000000) /* how often a waiter looks for the dead */
#define STALL_NANOSECONDS      UINT64_C(500000)   /* a predecessor this long on one chunk is helped */
#define SNAPSHOT_GRACE_SECONDS 1.0 /* out of spares for so long, a pusher cancels the snapshot */

struct pyps_store {
    int fd;
    pid_t process; /* the process that may use the handle */
    uint8_t *base;
    struct geometry geometry; /* local copies: what is read from shared memory is checked against them */
    struct layout layout;
    struct view *reference; /* a view as it must look: sizes and policy */
    const struct policy *policy;
    pyps_policy_needs needs;

    struct header *header; /* into the segment */
    struct slot *slots;
    a64 *words, *saved, *owners, *view_owners;

    struct chunk {
        uint32_t group, length;
    } *chunks; /* [geometry.chunks] derived at attach */

    uint32_t slot; /* NONE: not joined */
    uint64_t id;
    int role, rank;
    uint32_t private_view, private_buffer;        /* held by this handle, or NONE */
    uint32_t hints[4];                            /* buffers that were lately displaced here; NONE if empty */
    uint32_t scan, view_scan;                     /* where the next search for a free one starts */
    uint64_t staging_ticket[MAX_STAGING_BUFFERS]; /* last ticket admitted from each staging buffer; 0: none */
    bool staging_taken[MAX_STAGING_BUFFERS];      /* handed to the caller or waiting in a round */
    uint32_t gathered;                         /* bit by staging: it waits in a round that nobody waits for */
    uint32_t codes_backed, base_params_backed; /* bit by staging: its codes, its pulled copy have memory */
    bool residuals_backed;
    float *stream_to;   /* during an exchange: the caller's copy of the parameters */
    uint64_t *streamed; /* [chunks] the ticket with which a chunk went there */
    uint64_t stream_ticket;
    bool in_round; /* round_staging is staged into `round`, whose outcome a push has not returned yet */
    uint32_t round_staging;
    uint64_t round, pulled_version;
    uint64_t claimed_at; /* nanoseconds: when the claim under way was told */
    uint64_t complete;   /* every chunk has been seen at this version or later */

    struct ticket ticket; /* the ticket last looked up, with the view's snapshot as of then */
    struct source *sources;
    uint32_t source_count;
    uint64_t snapshot, snapshot_version;
    bool snapshot_active;

    int journal; /* file of its events; -1: none */

    pyps_store *next; /* list of open handles, for fork */
};

static inline uint64_t store_elements(const pyps_store *s) {
    return (uint64_t)s->geometry.chunks * s->geometry.chunk_params;
}

static inline uint32_t holder_of(const pyps_store *s) { return s->slot + 1; }

/* participant.c */
int store_usable(pyps_store *s, bool joined); /* PYPS_OK, or PYPS_EFORKED, PYPS_EINVAL */
int store_works(pyps_store *s);               /* the same, and that it has joined as a worker */
/* An unjoined handle borrows a free slot's hazards to read the view; no event tells of it. No-ops once
 * joined. */
int guest_enter(pyps_store *s, bool *guest);
void guest_leave(pyps_store *s, bool guest);
bool slot_is_dead(pyps_store *s, uint32_t slot);
int reap_dead(pyps_store *s, uint32_t *dead_out);
int lock_slot(pyps_store *s, uint32_t slot); /* PYPS_OK, PYPS_EBUSY or PYPS_ESYS */
void unlock_slot(pyps_store *s, uint32_t slot);

/* segment.c */
int allocate(pyps_store *s, uint64_t offset, uint64_t bytes); /* backs a hole with memory; PYPS_ENOSPC */

/* view_store.c: a copy of the present view for reading, and the commit of an event */
int view_copy(pyps_store *s, struct view *out);
/* Decides on the present view at the present time, which it writes into `e`, until its CAS is not lost. */
int view_commit(pyps_store *s, struct event *e, struct outcome *out, enum verdict *verdict);
struct view *view_allocate(const pyps_store *s);
uint32_t view_sequence_word(const pyps_store *s);
void view_wait(pyps_store *s, uint32_t seen, uint64_t nanoseconds);
struct event event_of(const pyps_store *s, enum event_kind kind);
/* Commits `e`, waiting while the verdict is STEP_WAIT: reaps the dead, and after the round timeout ticks. */
int view_commit_waiting(pyps_store *s, struct event *e, uint64_t deadline, struct outcome *out,
                        uint64_t *waited);
/* Into s->ticket, s->sources and s->snapshot*. STALE: the ring has moved on, so every chunk holds that
 * ticket. */
int view_load_ticket(pyps_store *s, uint64_t number);
int view_load_snapshot(pyps_store *s);                          /* s->snapshot* alone */
const struct view *view_pin(pyps_store *s, uint64_t *word_out); /* NULL: PYPS_ECORRUPT, message set */
void view_unpin(pyps_store *s);
/* Sleeps until the view moves on from `seen`, the time is `at` (0: no such time) or a slice of `deadline` has
 * passed, then takes out the dead, does what is next_deadline and, once `since` lies a round timeout back,
 * fences the late. PYPS_ETIMEDOUT at the deadline. */
int wait_for_others(pyps_store *s, uint32_t seen, uint64_t since, uint64_t at, uint64_t deadline);

/* journal.c */
void journal_event(pyps_store *s, const struct event *e, const struct outcome *o, enum verdict verdict,
                   const struct view *v);
void journal_close(pyps_store *s);

/* buffers.c */
float *buffer_floats(const pyps_store *s, uint32_t buffer, uint32_t vector); /* 0: parameters, 1..: states */
struct chunk_header *buffer_header(const pyps_store *s, uint32_t buffer);
int buffer_claim(pyps_store *s, uint32_t chunk); /* into s->private_buffer */
void buffer_published(pyps_store *s, uint32_t displaced);
void buffers_release(pyps_store *s, uint32_t holder); /* of a dead or leaving holder, views too */
int view_claim(pyps_store *s);                        /* into s->private_view */
void view_published(pyps_store *s);
/* Pins the buffer of a chunk's present word; PYPS_ECORRUPT if its index is impossible. */
int chunk_pin(pyps_store *s, uint32_t chunk, uint64_t *word_out);
void chunk_unpin(pyps_store *s);

/* push.c */
uint64_t deadline_of(const pyps_store *s,
                     double timeout_seconds); /* of a caller's timeout, as pyps.h has it */
void staging_forget(pyps_store *s);           /* of a step that is given up: all but what waits in a round */

/* pull.c */
void chunk_copy(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t vector, float *flat);
int record_pull(pyps_store *s, uint64_t version); /* tells the view */

/* encoded.c */
/* `length` floats from `at` of a staged gradient: in place, or decoded into `block`. */
const float *staging_gradient(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec,
                              uint64_t at, size_t length, float *block);
uint32_t staging_codec(const pyps_store *s, uint32_t slot, uint32_t staging);
/* Encodes one chunk, of which `values` are the parameters; all else in `flat` is of the whole vector. */
int encode_chunk(const pyps_store *s, uint32_t chunk, const float *values, struct encoding *flat);
/* Puts all that apply will read into the staging buffer; for error_feedback `e` tells the residuals. Nothing
 * has happened before `e` is committed. */
int stage_gradient(pyps_store *s, const pyps_push_args *args, struct event *e, pyps_push_result *out);

/* apply.c */
struct staging_header *staging_header(const pyps_store *s, uint32_t slot, uint32_t staging);
float *staging_data(const pyps_store *s, uint32_t slot, uint32_t staging);
float *staging_base_params(const pyps_store *s, uint32_t slot, uint32_t staging);
int chunk_advance(pyps_store *s, uint32_t chunk,
                  uint64_t version); /* applies tickets up to version, as needed */
/* Brings every chunk to `version`, following whoever is at it; `own` is the ticket that nobody but us is at,
 * or 0. */
int chunks_follow(pyps_store *s, uint64_t version, uint64_t own);
int chunks_complete(pyps_store *s, uint64_t version);      /* the same, at once if it has been seen before */
bool ticket_is_read(const pyps_store *s, uint64_t ticket); /* some hazard names it */

#endif
