/* buffers.h: who holds a buffer, and the view that says what is decided. */
#ifndef PYPS_BUFFERS_H
#define PYPS_BUFFERS_H

#include "store/segment.h"

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

#endif
