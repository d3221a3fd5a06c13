/* journal.c: appends the events that a handle commits to a journal file (policy/runs.h). */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "store/buffers.h"

/* A full disk may take a part of an entry: it goes, or what others append once there is room would be read as its
 * rest. Unless another entry has come after it. */
static void take_back(int fd, ssize_t written) {
    off_t end = lseek(fd, 0, SEEK_CUR);
    struct stat status;
    if (written > 0 && !fstat(fd, &status) && status.st_size == end && ftruncate(fd, end - written)) return;
}

/* False, and errno: not all of it is there. */
static bool put(int fd, struct journal_entry *entry, const void *more, size_t bytes) {
    static const uint8_t padding[8];
    size_t odd = -(sizeof *entry + bytes) & 7;
    struct iovec parts[] = {
        {entry, sizeof *entry}, {(void *)(uintptr_t)more, bytes}, {(void *)(uintptr_t)padding, odd}};
    entry->mark = JOURNAL_MARK, entry->bytes = (uint32_t)(sizeof *entry + bytes + odd);
    ssize_t rc;
    do rc = writev(fd, parts, 3);
    while (rc < 0 && errno == EINTR);
    if (rc == (ssize_t)entry->bytes) return true;
    int error = rc < 0 ? errno : ENOSPC;
    take_back(fd, rc);
    errno = error;
    return false;
}

/* A full disk ends the journal, not the training: a replay then lacks the later events. So does a descriptor that leads
 * to another file of this process by now. */
void journal_event(pyps_store *s, const struct event *e, const struct outcome *o, enum verdict verdict,
                   const struct view *v) {
    if (s->journal < 0) return;
    if (!file_is_behind(s->journal, s->journal_file)) {
        s->journal = -1;
        return;
    }
    struct journal_entry entry;
    memset(&entry, 0, sizeof entry);
    entry.store = s->header->drawn, entry.sequence = v->sequence, entry.verdict = verdict, entry.event = *e,
    entry.outcome = *o;
    entry.digest = verdict == STEP_COMMIT ? journal_digest(v) : 0;
    const void *more = e->kind == EVENT_SCHEDULE ? (const void *)e->turns : e->batches;
    size_t each = e->kind == EVENT_SCHEDULE ? sizeof *e->turns : sizeof *e->batches;
    if (!put(s->journal, &entry, more, more ? e->count * each : 0)) journal_close(s);
}

/* A journal of this user's, or an empty file: nothing is ever appended to another one. */
static int check_file(int fd, const char *path) {
    struct stat status;
    uint32_t mark = JOURNAL_MARK;
    if (fstat(fd, &status)) return fail(PYPS_ESYS, "journal: %s: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode)) return fail(PYPS_ECORRUPT, "journal: %s: not a regular file", path);
    if (status.st_uid != geteuid())
        return fail(PYPS_EPERM, "journal: %s: found owner %u; expected %u", path, status.st_uid, geteuid());
    if (status.st_size && (pread(fd, &mark, sizeof mark, 0) != sizeof mark || mark != JOURNAL_MARK))
        return fail(PYPS_ECORRUPT, "journal: %s: found a file that is no journal; expected one, or none",
                    path);
    return PYPS_OK;
}

int journal_open(const char *path, int *fd_out) {
    int fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0 && errno == ELOOP) return fail(PYPS_ECORRUPT, "journal: %s: a link", path);
    if (fd < 0) return fail(PYPS_ESYS, "journal: %s: %s", path, strerror(errno));
    int rc = check_file(fd, path);
    if (rc) close(fd);
    else *fd_out = fd;
    return rc;
}

int journal_view(const pyps_store *s, const struct view *v) {
    struct journal_entry entry;
    memset(&entry, 0, sizeof entry);
    entry.store = s->header->drawn, entry.sequence = v->sequence, entry.digest = journal_digest(v);
    if (put(s->journal, &entry, v, view_used_bytes(v))) return PYPS_OK;
    return fail(PYPS_ESYS, "journal: writing: %s", strerror(errno));
}
