/* slots.c: what participants show in their slots: who reads what (hazards), who is dead, and what the dead hold.
 *
 * The participant in slot i write-locks byte i of the file; the kernel releases the lock when the process
 * ends. The same byte makes reclaiming exclusive: the reclaimer of a dead participant's slot holds its lock,
 * and if that reclaimer dies the lock is free again. A stopped reclaimer keeps only a dead participant's
 * slot, for which no other participant waits.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/buffers.h"

#define UNKNOWN_START UINT64_MAX

static bool hazarded(const pyps_store *s, size_t field, uint64_t value) {
    for (uint32_t slot = 0; slot < s->geometry.max_participants; slot++) {
        const a64 *hazard = (const a64 *)(const void *)((const char *)&s->slots[slot] + field);
        if (load_seq(hazard) == value) return true; /* W2 of atomics.h; W1 is the caller's */
    }
    return false;
}

bool buffer_has_reader(const pyps_store *s, uint32_t buffer) {
    return hazarded(s, offsetof(struct slot, chunk_hazard), buffer + UINT64_C(1));
}

bool view_has_reader(const pyps_store *s, uint32_t buffer) {
    return hazarded(s, offsetof(struct slot, view_hazard), buffer + UINT64_C(1));
}

bool staging_has_reader(const pyps_store *s, uint64_t ticket) {
    return hazarded(s, offsetof(struct slot, ticket_hazard), ticket);
}

bool residual_has_reader(const pyps_store *s, uint32_t residual) {
    return hazarded(s, offsetof(struct slot, residual_hazard), residual);
}

void owner_release(a64 *owner_word, uint32_t holder) {
    uint64_t owner = load_acquire(owner_word);
    if (owner_holder(owner) == holder)
        cas_seq(owner_word, owner, owner_make(owner_generation(owner), HOLDER_NONE, owner_chunk(owner)));
}

static void buffers_release(pyps_store *s, uint32_t holder) {
    for (uint32_t b = 0; b < s->layout.buffer_count; b++) owner_release(&s->owners[b], holder);
    for (uint32_t v = 0; v < s->layout.view_count; v++) owner_release(&s->view_owners[v], holder);
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
    /* Of its main thread, whose start is the process's: qemu-user makes up a process's own /proc/PID/stat. */
    snprintf(path, sizeof path, "/proc/%lu/task/%lu/stat", pid, pid);
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

void slot_clear(pyps_store *s, uint32_t slot) {
    struct slot *t = &s->slots[slot];
    store_seq(&t->chunk_hazard, 0), store_seq(&t->view_hazard, 0), store_seq(&t->ticket_hazard, 0);
    store_seq(&t->residual_hazard, 0);
    buffers_release(s, slot + 1);
}

/* With its lock held, or PYPS_EBUSY: another reclaimer, or a fork of the dead process, has it; or this handle does,
 * for which a second lock would be the same one. */
int slot_lock_dead(pyps_store *s, uint32_t slot, uint64_t id) {
    if (slot == s->reclaims) return PYPS_EBUSY;
    int rc = slot_lock(s, slot);
    if (rc) return rc;
    if (load_acquire(&s->slots[slot].id) == id) return PYPS_OK;
    slot_unlock(s, slot);
    return PYPS_EBUSY;
}

void slots_release_dead(pyps_store *s) {
    for (uint32_t slot = 0; slot < s->geometry.max_participants; slot++) {
        uint64_t id = load_acquire(&s->slots[slot].id);
        if (!slot_is_dead(s, slot) || slot_lock_dead(s, slot, id)) continue;
        slot_clear(s, slot);
        slot_unlock(s, slot);
    }
}

/* Names this process as the slot's owner. If it dies from here on, reaping releases the hazards and buffers
 * that it holds as a helper, even before it is a member. */
void slot_sign(pyps_store *s) {
    struct slot *slot = &s->slots[s->slot];
    s->id = add64_relaxed(&s->header->next_id, 1);
    store_relaxed(&slot->process, (uint64_t)getpid());
    store_relaxed(&slot->start_time, start_time((uint64_t)getpid()));
    store_relaxed(&slot->pid_namespace, pid_namespace());
    activity_joined(s);
    store_release(&slot->id, s->id);
}
