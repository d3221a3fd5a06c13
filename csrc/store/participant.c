/* participant.c: joining, leaving, and detection of dead participants.
 *
 * The participant in slot i write-locks byte i of the file; the kernel releases the lock when the process
 * ends. The same byte makes reclaiming exclusive: the reclaimer of a dead participant's slot holds its lock,
 * and if that reclaimer dies the lock is free again. A stopped reclaimer keeps only a dead participant's
 * slot, for which no other participant waits.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/segment.h"
#include "store/store.h"

#define READER_GRACE_NANOSECONDS UINT64_C(20000000) /* the time that helpers get to finish reading */
#define READER_SLICE_NANOSECONDS UINT64_C(100000)
#define UNKNOWN_START            UINT64_MAX

int store_check_usable(pyps_store *s, bool joined) {
    if (!s) return fail(PYPS_EINVAL, "store: found NULL");
    if (!s->process)
        return fail(PYPS_EFORKED,
                    "this handle belongs to the parent process; open the store again after fork");
    if (joined && s->slot == NONE) return fail(PYPS_EINVAL, "not a participant; join first");
    return PYPS_OK;
}

int store_check_worker(pyps_store *s) {
    int rc = store_check_usable(s, true);
    return rc || s->role == PYPS_WORKER ? rc
                                        : fail(PYPS_EINVAL, "an observer takes no steps; join as a worker");
}

int slot_lock(pyps_store *s, uint32_t slot) { return segment_lock_byte(s->fd, F_WRLCK, slot); }
void slot_unlock(pyps_store *s, uint32_t slot) { segment_lock_byte(s->fd, F_UNLCK, slot); }

static uint64_t pid_namespace(void) {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) ? 0 : (uint64_t)status.st_ino;
}

/* Start time of a process in ticks since boot; 0: it is gone, or a zombie. UNKNOWN_START: it could not be
 * read, for example because this process has no free descriptor. */
static uint64_t start_time(uint64_t pid) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, line, sizeof line - 1);
    int error = errno;
    if (fd >= 0) close(fd);
    if (length < 0) return error == ENOENT || error == ESRCH ? 0 : UNKNOWN_START;
    line[length] = 0;
    char *after = strrchr(line, ')'); /* the name before it may hold anything */
    char state = 0;
    unsigned long threads = 0;
    unsigned long long started = 0;
    if (!after ||
        sscanf(after + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lu %*s %llu",
               &state, &threads, &started) != 3)
        return UNKNOWN_START;
    /* A main thread that has ended shows as a zombie while other threads of its process live. */
    return (state == 'Z' && threads < 2) || state == 'X' ? 0 : started;
}

bool slot_is_dead(pyps_store *s, uint32_t slot) {
    const struct slot *other = &s->slots[slot];
    if (slot == s->slot || !load_acquire(&other->id)) return false;
    if (!segment_byte_locked(s->fd, slot)) return true;
    if (load_acquire(&other->pid_namespace) != pid_namespace()) return false;
    uint64_t found = start_time(load_acquire(&other->process)), expected = load_acquire(&other->start_time);
    return found != expected && found != UNKNOWN_START && expected != UNKNOWN_START;
}

static int commit_leave(pyps_store *s, uint32_t slot, uint64_t id, uint32_t state, bool *changed) {
    struct event e = store_event(s, EVENT_LEAVE);
    struct outcome out;
    enum verdict verdict = STEP_UNCHANGED;
    e.slot = slot, e.id = id, e.state = state;
    int rc = view_commit(s, &e, &out, &verdict);
    *changed = !rc && verdict == STEP_COMMIT;
    return rc;
}

static int present_version(pyps_store *s, uint64_t *version) {
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    *version = v->version;
    view_unpin(s);
    return PYPS_OK;
}

static void clear_slot(pyps_store *s, uint32_t slot) {
    struct slot *t = &s->slots[slot];
    store_seq(&t->chunk_hazard, 0), store_seq(&t->view_hazard, 0), store_seq(&t->ticket_hazard, 0);
    store_seq(&t->residual_hazard, 0);
    buffers_release(s, slot + 1);
}

/* With the dead participant's lock held: completes its admitted pushes, releases what it pinned or held. */
static int reclaim(pyps_store *s, uint32_t slot, uint64_t id) {
    uint64_t version;
    int rc = present_version(s, &version);
    if (rc || (rc = chunks_complete(s, version))) return rc;
    if (load_acquire(&s->slots[slot].id) != id) return PYPS_OK;
    clear_slot(s, slot);
    FAILPOINT("reclaim.cleared");
    store_seq(&s->slots[slot].id, 0);
    return PYPS_OK;
}

int slot_reap_dead(pyps_store *s, uint32_t *dead_out) {
    uint32_t dead = 0;
    int rc = PYPS_OK;
    for (uint32_t slot = 0; slot < s->geometry.max_participants && !rc; slot++) {
        uint64_t id = load_acquire(&s->slots[slot].id);
        bool changed;
        if (!slot_is_dead(s, slot)) continue;
        if ((rc = commit_leave(s, slot, id, PYPS_DEAD, &changed))) break;
        dead += changed;
        if (slot_lock(s, slot)) continue; /* another reclaimer, or a fork of the dead process, has the lock */
        if (load_acquire(&s->slots[slot].id) == id) rc = reclaim(s, slot, id);
        slot_unlock(s, slot);
    }
    if (dead_out) *dead_out = dead;
    return rc;
}

/* Names this process as the slot's owner. If it dies from here on, reaping releases the hazards and buffers
 * that it holds as a helper, even before it is a member. */
static void sign_slot(pyps_store *s) {
    struct slot *slot = &s->slots[s->slot];
    s->id = add64_relaxed(&s->header->next_id, 1);
    store_relaxed(&slot->process, (uint64_t)getpid());
    store_relaxed(&slot->start_time, start_time((uint64_t)getpid()));
    store_relaxed(&slot->pid_namespace, pid_namespace());
    activity_joined(s);
    store_release(&slot->id, s->id);
}

/* Is any staging buffer of this slot still needed, by a round that has not closed or by a helper that still
 * reads a completed ticket? */
static bool staging_is_needed(pyps_store *s, const struct member *before) {
    bool needed = before->staged;
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++) {
        s->staging_ticket[staging] = before->staging_ticket[staging];
        needed |= s->staging_ticket[staging] && staging_has_reader(s, s->staging_ticket[staging]);
    }
    return needed;
}

static bool slot_has(uint32_t slot, uint32_t residual) {
    return residual && (residual - 1) / RESIDUALS_A_SLOT == slot;
}

/* Does this slot have the residual of another rank? A new worker would overwrite it (encoded.c). */
static bool holds_residual(const pyps_store *s, const struct view *v, int rank) {
    for (uint32_t r = 0; r < v->ranks; r++)
        if ((int)r != rank && (slot_has(s->slot, view_rank(v, r)->residual) ||
                               slot_has(s->slot, view_rank(v, r)->version_residual)))
            return true;
    return false;
}

/* Is another free slot the one that has this rank's residual? */
static bool other_slot_suits(const pyps_store *s, const struct view *v, int rank) {
    uint32_t residual = rank >= 0 && rank < (int)v->ranks ? view_rank(v, (uint32_t)rank)->residual : 0;
    return residual && !slot_has(s->slot, residual) &&
           !load_acquire(&s->slots[(residual - 1) / RESIDUALS_A_SLOT].id);
}

enum taste { ONLY_BEST, ANY_UNNEEDED, ANY };

/* PYPS_EBUSY: this slot's staging or a residual in it is still needed, or another slot is better; try another
 * one. An anonymous reader needs no staging and completes no pushes: it brings no spares to do so with. */
static int take_over(pyps_store *s, bool anonymous, int rank, enum taste taste) {
    uint64_t id = load_acquire(&s->slots[s->slot].id), version, word;
    bool changed;
    clear_slot(s, s->slot);
    int rc = id ? commit_leave(s, s->slot, id, PYPS_DEAD, &changed) : PYPS_OK;
    if (rc) return rc;
    sign_slot(s);
    FAILPOINT("join.signed");
    if (anonymous) return PYPS_OK;
    if ((rc = present_version(s, &version)) || (rc = chunks_complete(s, version))) return rc;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    bool needed = !view_valid(v, s->expected) || staging_is_needed(s, view_member(v, s->slot)) ||
                  (taste < ANY && holds_residual(s, v, rank)) ||
                  (taste == ONLY_BEST && other_slot_suits(s, v, rank));
    view_unpin(s);
    return needed ? PYPS_EBUSY : PYPS_OK;
}

static int allocate_memory(pyps_store *s, int role) {
    uint32_t first = s->layout.common_buffers + SPARES_A_SLOT * s->slot;
    int rc = segment_allocate(s, s->layout.buffers + first * s->layout.buffer_stride,
                              SPARES_A_SLOT * s->layout.buffer_stride);
    for (uint32_t staging = 0; !rc && role == PYPS_WORKER && staging < s->geometry.staging_buffers; staging++)
        rc = segment_allocate(s,
                              s->layout.staging + (s->slot * s->geometry.staging_buffers + staging) *
                                                      s->layout.staging_stride,
                              s->layout.staging_codes);
    for (uint32_t b = first; !rc && b < first + SPARES_A_SLOT; b++) {
        uint64_t owner = load_acquire(&s->owners[b]);
        if (owner_holder(owner) == HOLDER_ABSENT)
            cas_seq(&s->owners[b], owner, owner_make(0, HOLDER_NONE, OWNER_CHUNK_NONE));
        s->free_cache[b - first] = b;
    }
    return rc;
}

static void reset_membership(pyps_store *s) {
    reading_drop(s);
    s->slot = s->private_view = s->private_buffer = NONE;
    s->id = 0, s->rank = -1, s->in_round = false, s->complete_version = 0, s->ticket.number = 0;
    memset(s->staging_ticket, 0, sizeof s->staging_ticket);
    memset(s->staging_taken, 0, sizeof s->staging_taken);
    s->codes_allocated = s->base_params_allocated = s->parked = s->residuals_allocated = 0;
    s->claimed_at = 0;
}

static int enter(pyps_store *s, int role, int rank) {
    s->role = role == PYPS_NEW_WORKER ? PYPS_WORKER : role;
    int rc = allocate_memory(s, s->role);
    if (rc) return rc;
    FAILPOINT("join.entered");
    if ((rc = slot_reap_dead(s, NULL))) return rc; /* a dead worker's rank is free */
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
    clear_slot(s, s->slot);
    store_seq(&s->slots[s->slot].id, 0);
    slot_unlock(s, s->slot);
    reset_membership(s);
}

/* Tries every slot: the empty ones, that with this rank's residual (-1: no rank) before others; then those of
 * dead participants, then those with another rank's residual. PYPS_EBUSY: the staging buffers of one are
 * still needed. */
static int try_slots(pyps_store *s, bool anonymous, int rank) {
    uint32_t count = s->geometry.max_participants;
    int result = PYPS_EFULL;
    for (uint32_t i = 0; i < 3 * count; i++) {
        uint32_t slot = i % count;
        if ((i < count && load_acquire(&s->slots[slot].id)) || slot_lock(s, slot)) continue;
        reset_membership(s);
        s->slot = slot;
        int rc = take_over(s, anonymous, rank, (enum taste)(i / count));
        if (!rc) return PYPS_OK;
        release_slot(s);
        if (rc != PYPS_EBUSY) return rc;
        result = PYPS_EBUSY;
    }
    return result;
}

/* Locks and clears a free slot; PYPS_EFULL if there is none. */
static int find_slot(pyps_store *s, bool anonymous, int rank) {
    uint64_t deadline = wait_now_nanoseconds() + READER_GRACE_NANOSECONDS;
    int rc = try_slots(s, anonymous, rank);
    while (rc == PYPS_EBUSY && wait_now_nanoseconds() < deadline) {
        wait_on_word(&s->header->progress, load32_acquire(&s->header->progress), READER_SLICE_NANOSECONDS);
        rc = try_slots(s, anonymous, rank);
    }
    if (rc != PYPS_EFULL && rc != PYPS_EBUSY) return rc;
    return fail(PYPS_EFULL, "max_participants: all %u slots are in use", s->geometry.max_participants);
}

int anonymous_reader_enter(pyps_store *s, bool *anonymous) {
    int rc = store_check_usable(s, false);
    *anonymous = !rc && s->slot == NONE;
    return *anonymous ? find_slot(s, true, -1) : rc;
}

void anonymous_reader_leave(pyps_store *s, bool anonymous) {
    if (anonymous && s->slot != NONE) release_slot(s);
}

int pyps_join(pyps_store *s, int role, int rank, int *rank_out) {
    int rc = store_check_usable(s, false);
    if (rc) return rc;
    if (s->slot != NONE) return fail(PYPS_EINVAL, "this handle has joined already");
    if (role != PYPS_WORKER && role != PYPS_OBSERVER && role != PYPS_NEW_WORKER)
        return fail(PYPS_EINVAL, "role: found %d; expected 0 to 2", role);
    if ((rc = find_slot(s, false, role == PYPS_OBSERVER ? -1 : rank))) return rc;
    if ((rc = enter(s, role, rank))) release_slot(s);
    else if (rank_out) *rank_out = s->rank;
    return rc;
}

int pyps_leave(pyps_store *s) {
    int rc = store_check_usable(s, true);
    if (rc) return rc;
    bool changed;
    rc = commit_leave(s, s->slot, s->id, PYPS_LEFT, &changed);
    release_slot(s);
    return rc;
}

int pyps_rejoin(pyps_store *s) {
    int rc = store_check_usable(s, true);
    if (rc) return rc;
    struct event e = store_event(s, EVENT_REJOIN);
    struct outcome out;
    enum verdict verdict;
    if ((rc = view_commit(s, &e, &out, &verdict))) return rc;
    staging_abandon(s);
    return PYPS_OK;
}

int pyps_reap(pyps_store *s, uint32_t *dead_out) {
    bool anonymous;
    int rc = anonymous_reader_enter(s, &anonymous);
    if (!rc) rc = slot_reap_dead(s, dead_out);
    anonymous_reader_leave(s, anonymous);
    return rc;
}
