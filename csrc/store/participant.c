/* participant.c: joining and leaving: which slot a participant takes, with what memory, and what it leaves behind.
 */
#include <string.h>
#include <unistd.h>

#include "store/participants.h"

#define READER_GRACE_NANOSECONDS UINT64_C(20000000) /* the time that helpers get to finish reading */
#define KEPT_SLOTS               8u /* that no thread takes: observers, new workers, those that reap */
#define READER_SLICE_NANOSECONDS UINT64_C(100000)

/* Is any staging buffer of this slot still needed: by a round that has not closed, by a ticket that this handle has not
 * seen complete (its round may have closed since), or by a helper that still reads a completed one? */
static bool staging_is_needed(pyps_store *s, const struct member *before) {
    bool needed = before->staged;
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++) {
        s->own_staging[staging].ticket = before->staging_ticket[staging];
        uint64_t ticket = s->own_staging[staging].ticket;
        needed |= ticket > s->complete_version || (ticket && staging_has_reader(s, ticket));
    }
    return needed;
}

static bool slot_has(uint32_t slot, uint32_t residual) {
    return residual && (residual - 1) / RESIDUALS_A_SLOT == slot;
}

/* Does this slot have the residual of another rank? A new worker would overwrite it (encoded.c). */
static bool holds_residual(const pyps_store *s, const struct view *v, int rank) {
    for (uint32_t r = 0, ranks = pinned_ranks(s, v); r < ranks; r++) {
        const struct rank *other = pinned_rank(s, v, r);
        if ((int)r != rank &&
            (slot_has(s->slot, other->residual) || slot_has(s->slot, other->version_residual)))
            return true;
    }
    return false;
}

/* Is another free slot the one that has this rank's residual? */
static bool other_slot_suits(pyps_store *s, const struct view *v, int rank) {
    uint32_t ranks = pinned_ranks(s, v);
    uint32_t residual = rank >= 0 && rank < (int)ranks
                            ? *(const volatile uint32_t *)&pinned_rank(s, v, (uint32_t)rank)->residual
                            : 0;
    uint32_t other = (residual - 1) / RESIDUALS_A_SLOT;
    return residual && other != s->slot && other < s->geometry.max_participants &&
           (!load_acquire(&s->slots[other].id) || slot_is_dead(s, other));
}

static uint32_t first_spare(const pyps_store *s, uint32_t slot) {
    return s->layout.common_buffers + SPARES_A_SLOT * slot;
}

static bool slot_has_spares(const pyps_store *s, uint32_t slot) {
    bool all = true;
    for (uint32_t i = 0; i < SPARES_A_SLOT; i++)
        all &= owner_holder(load_acquire(&s->owners[first_spare(s, slot) + i])) != HOLDER_ABSENT;
    return all;
}

/* Once a slot has had its spares it keeps them for the next participant. */
static int bring_spares(pyps_store *s) {
    uint32_t first = first_spare(s, s->slot);
    if (!slot_has_spares(s, s->slot)) {
        int rc = segment_allocate(s, s->layout.buffers + first * s->layout.buffer_stride,
                                  SPARES_A_SLOT * s->layout.buffer_stride);
        if (rc) return rc;
    }
    for (uint32_t b = first; b < first + SPARES_A_SLOT; b++) {
        uint64_t owner = load_acquire(&s->owners[b]);
        if (owner_holder(owner) == HOLDER_ABSENT)
            cas_seq(&s->owners[b], owner, owner_make(0, HOLDER_NONE, OWNER_CHUNK_NONE));
        s->free_cache[b - first] = b;
    }
    return PYPS_OK;
}

/* Their headers: staging.c gives them the rest. */
static int bring_staging(pyps_store *s) {
    int rc = PYPS_OK;
    for (uint32_t staging = 0; !rc && staging < s->geometry.staging_buffers; staging++)
        rc = segment_allocate(s,
                              s->layout.staging + (s->slot * s->geometry.staging_buffers + staging) *
                                                      s->layout.staging_stride,
                              s->layout.staging_data);
    return rc;
}

enum purpose { TO_REAP, TO_OBSERVE, TO_WORK };
enum taste { ONLY_BEST, ANY_UNNEEDED, ANY };

/* What a joiner needs of a slot, in the order of trying. */
static const struct pass {
    bool fresh; /* one that has no memory yet will do */
    enum taste taste;
} passes[] = {{false, ONLY_BEST}, {false, ANY_UNNEEDED}, {true, ANY_UNNEEDED}, {true, ANY}};

/* Memory first: from its signature on the participant may help, and so pin one buffer and hold one, for as long as
 * it is stopped or until it is found dead. PYPS_EBUSY: this slot's staging or a residual in it is still needed, or
 * another slot is better; try another one. */
static int take_over(pyps_store *s, enum purpose purpose, int rank, enum taste taste) {
    uint64_t id = load_acquire(&s->slots[s->slot].id), version, word;
    bool changed = false;
    slot_clear(s, s->slot);
    int rc = id ? member_leave(s, s->slot, id, PYPS_DEAD, &changed) : PYPS_OK;
    s->found_dead += changed;
    if (rc || (rc = bring_spares(s)) || (purpose == TO_WORK && (rc = bring_staging(s)))) return rc;
    FAILPOINT("join.supplied");
    slot_sign(s);
    FAILPOINT("join.signed");
    if ((rc = view_version(s, &version)) || (rc = chunks_complete(s, version))) return rc;
    if (purpose == TO_REAP) return PYPS_OK; /* it leaves staging and residuals as they are */
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    bool needed = staging_is_needed(s, pinned_member(s, v, s->slot)) ||
                  (taste < ANY && holds_residual(s, v, rank)) ||
                  (taste == ONLY_BEST && other_slot_suits(s, v, rank));
    view_unpin(s);
    return needed ? PYPS_EBUSY : PYPS_OK;
}

static void reset_membership(pyps_store *s) {
    reading_drop(s);
    s->slot = s->private_view = s->private_buffer = NONE;
    s->id = 0, s->rank = -1, s->round.pending = false, s->complete_version = 0, s->ticket.number = 0;
    memset(s->own_staging, 0, sizeof s->own_staging);
    s->residuals_allocated = s->parked = 0, s->turn.opened_at = s->turn.waited = 0,
    s->claimed_at = s->own.ticket = 0;
}

static int enter(pyps_store *s, int role, int rank) {
    s->role = role == PYPS_NEW_WORKER ? PYPS_WORKER : role;
    FAILPOINT("join.entered");
    int rc = slot_reap_dead(s, NULL); /* a dead worker's rank is free */
    if (rc) return rc;
    struct event e = store_event(s, EVENT_JOIN);
    struct outcome out;
    enum verdict verdict;
    e.role = (uint32_t)s->role, e.rank = s->role == PYPS_WORKER ? rank : -1, e.pid = (uint32_t)getpid();
    e.grows = role == PYPS_NEW_WORKER;
    rc = view_commit(s, &e, &out, &verdict);
    s->rank = out.rank;
    return rc;
}

static void release_slot(pyps_store *s) {
    slot_clear(s, s->slot);
    store_seq(&s->slots[s->slot].id, 0);
    slot_unlock(s, s->slot);
    reset_membership(s);
}

/* PYPS_OK: it is locked and taken over. TRY_AGAIN: another one may do. */
static int try_slot(pyps_store *s, uint32_t slot, enum purpose purpose, int rank, const struct pass *pass) {
    if (!pass->fresh && !slot_has_spares(s, slot)) return TRY_AGAIN;
    int rc = slot_lock(s, slot);
    if (rc) return rc == PYPS_EBUSY ? TRY_AGAIN : rc;
    reset_membership(s);
    s->slot = slot;
    rc = take_over(s, purpose, rank, pass->taste);
    if (rc) release_slot(s);
    return rc;
}

/* Tries every slot that no live participant has: those with memory before fresh ones, so that a restart needs no
 * more of it; that with this rank's residual (-1: no rank) before others, and those with another rank's last.
 * PYPS_EBUSY: the staging buffers of one are still needed. PYPS_ENOSPC, PYPS_EFULL: the others lack memory. TRY_AGAIN:
 * all are in use. */
static int try_slots(pyps_store *s, enum purpose purpose, int rank) {
    int result = TRY_AGAIN;
    for (size_t p = 0; p < sizeof passes / sizeof *passes; p++)
        for (uint32_t slot = 0; slot < s->geometry.max_participants; slot++) {
            bool lacks = result == PYPS_ENOSPC && !slot_has_spares(s, slot);
            int rc = lacks ? TRY_AGAIN : try_slot(s, slot, purpose, rank, &passes[p]);
            bool lacking = rc == PYPS_ENOSPC || rc == PYPS_EFULL;
            if (!lacking && rc != PYPS_EBUSY && rc != TRY_AGAIN) return rc;
            if (lacking || (rc == PYPS_EBUSY && result == TRY_AGAIN)) result = rc;
        }
    return result;
}

/* Locks and clears a free slot; PYPS_EFULL if there is none. */
static int find_slot(pyps_store *s, enum purpose purpose, int rank) {
    uint64_t deadline = wait_now_nanoseconds() + READER_GRACE_NANOSECONDS;
    int rc = try_slots(s, purpose, rank);
    while (rc == PYPS_EBUSY && wait_now_nanoseconds() < deadline) {
        slots_release_dead(s); /* a dead helper may be what reads that staging */
        wait_on_word(&s->header->progress, load32_acquire(&s->header->progress), READER_SLICE_NANOSECONDS);
        rc = try_slots(s, purpose, rank);
    }
    if (rc == PYPS_EBUSY)
        return fail(PYPS_EFULL,
                    "max_participants: of %u slots the free ones hold gradients that are read, or that "
                    "wait for their round; join again when it has closed",
                    s->geometry.max_participants);
    if (rc != TRY_AGAIN) return rc;
    return fail(PYPS_EFULL, "max_participants: all %u slots are in use", s->geometry.max_participants);
}

/* A hand's: none that a rank or one of KEPT_SLOTS others may need, and none that holds anything. */
static int take_slot(pyps_store *hand) {
    for (uint32_t slot = hand->geometry.max_participants; slot-- > hand->geometry.ranks + KEPT_SLOTS;) {
        if (load_acquire(&hand->slots[slot].id) || slot_lock(hand, slot)) continue;
        hand->slot = slot;
        int rc = load_acquire(&hand->slots[slot].id) ? PYPS_EBUSY : take_over(hand, TO_REAP, -1, ANY);
        if (!rc) return PYPS_OK;
        if (rc == PYPS_EBUSY) slot_unlock(hand, slot), hand->slot = NONE;
        else release_slot(hand);
        if (rc != PYPS_EBUSY) return rc;
    }
    return fail(PYPS_EFULL, "max_participants: of %u slots none past %u ranks and %u others is free",
                hand->geometry.max_participants, hand->geometry.ranks, KEPT_SLOTS);
}

/* As many as find a slot and memory. */
static void begin_crew(pyps_store *s) {
    int rc = s->role == PYPS_WORKER ? PYPS_OK : PYPS_EBUSY;
    while (!rc && crew_threads(s) < s->threads) rc = crew_add(s, take_slot, release_slot);
}

int pyps_set_threads(pyps_store *s, uint32_t threads, uint32_t *threads_out) {
    int rc = store_check_usable(s, false);
    if (rc || (rc = pyps__between("threads", threads, 1, MOST_THREADS))) return rc;
    s->threads = threads;
    if (crew_threads(s) > threads) crew_end(s, release_slot);
    if (s->slot != NONE) begin_crew(s);
    if (threads_out) *threads_out = crew_threads(s);
    return PYPS_OK;
}

int pyps_join(pyps_store *s, int role, int rank, int *rank_out) {
    int rc = store_check_usable(s, false);
    if (rc) return rc;
    if (s->slot != NONE) return fail(PYPS_EINVAL, "this handle has joined already");
    if ((rc = mapping_renew(s))) return rc;
    if (role != PYPS_WORKER && role != PYPS_OBSERVER && role != PYPS_NEW_WORKER)
        return fail(PYPS_EINVAL, "role: found %d; expected 0 to 2", role);
    bool works = role != PYPS_OBSERVER;
    if ((rc = find_slot(s, works ? TO_WORK : TO_OBSERVE, works ? rank : -1))) return rc;
    if ((rc = enter(s, role, rank))) release_slot(s);
    if (rc) return rc;
    if (rank_out) *rank_out = s->rank;
    begin_crew(s);
    return PYPS_OK;
}

/* Where no round that is open and no helper needs it. */
static void give_back_staging(pyps_store *s) {
    uint64_t version, word;
    if (s->role != PYPS_WORKER || view_version(s, &version) || chunks_complete(s, version)) return;
    FAILPOINT("leave.completed");
    const struct view *v = view_pin(s, &word);
    bool needed = !v || staging_is_needed(s, pinned_member(s, v, s->slot));
    view_unpin(s);
    if (!needed) staging_give_back(s);
}

static int leave(pyps_store *s, bool detaches) {
    int rc = store_check_usable(s, true), failed = PYPS_OK;
    if (rc) return rc;
    bool changed;
    crew_end(s, release_slot);
    rc = member_leave(s, s->slot, s->id, PYPS_LEFT, &changed);
    if (!rc) give_back_staging(s);
    if (detaches && s->role == PYPS_WORKER) failed = mapping_detach_staging(s);
    if (failed) return failed; /* the slot stays this handle's: pointers into it may be left */
    release_slot(s);
    return rc;
}

int participant_leave(pyps_store *s) { return leave(s, false); }
int pyps_leave(pyps_store *s) { return leave(s, true); }

int pyps_rejoin(pyps_store *s) {
    int rc = store_check_usable(s, true);
    if (rc) return rc;
    struct event e = store_event(s, EVENT_REJOIN);
    if ((rc = view_commit_only(s, &e))) return rc;
    staging_abandon(s);
    return PYPS_OK;
}

static bool any_dead(pyps_store *s) {
    for (uint32_t slot = 0; slot < s->geometry.max_participants; slot++)
        if (slot_is_dead(s, slot)) return true;
    return false;
}

/* A handle that has not joined takes a slot meanwhile, that of a dead one if there is no other. */
int pyps_reap(pyps_store *s, uint32_t *dead_out) {
    int rc = store_check_usable(s, false);
    bool joined = !rc && s->slot != NONE;
    uint32_t dead = 0;
    if (dead_out) *dead_out = 0;
    if (rc || !any_dead(s)) return rc;
    s->found_dead = 0;
    if ((rc = joined ? PYPS_OK : mapping_renew(s))) return rc;
    if (!joined && (rc = find_slot(s, TO_REAP, -1))) return rc;
    rc = slot_reap_dead(s, &dead);
    if (dead_out) *dead_out = dead + s->found_dead;
    if (!joined) release_slot(s);
    return rc;
}
