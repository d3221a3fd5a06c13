/* handle.c: a process's handles: which may be used, the file locks of each, and what becomes of them in a forked
 * child. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/segment.h"

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static pyps_store *handles;
static uint8_t *addresses, *addresses_end; /* that no handle has had yet */
static int (*interrupted)(void);

#define ADDRESSES (UINT64_C(1) << 26) /* taken at once, of which only those of open handles have memory */

/* A leak checker, where there is one, looks for pointers in memory from malloc alone unless it is told. */
void __lsan_register_root_region(const void *from, size_t bytes) __attribute__((weak));

static bool is_of(const struct stat *found, struct file file) {
    return found->st_dev == file.device && found->st_ino == file.inode;
}

struct file file_behind(int fd) {
    struct stat found;
    if (fstat(fd, &found)) return (struct file){0};
    return (struct file){.device = found.st_dev, .inode = found.st_ino};
}

bool file_is_behind(int fd, struct file file) {
    struct stat found;
    return !fstat(fd, &found) && is_of(&found, file);
}

void file_close(int fd, struct file file) {
    if (file_is_behind(fd, file)) close(fd);
}

static void before_fork(void) { pthread_mutex_lock(&handles_lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&handles_lock); }

/* The child shares the parent's file descriptions and so its locks. It closes them, or the parent would never
 * be found dead. It does not have the mapping (mapping.c). */
static void after_fork_child(void) {
    for (pyps_store *s = handles; s; s = s->next) {
        file_close(s->fd, s->file);
        journal_close(s);
        s->fd = -1, s->process = 0;
    }
    pthread_mutex_unlock(&handles_lock);
}

static void install_fork_handlers(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

/* No fork may happen between opening a file and listing its handle, where a forked child finds what to
 * close. */
void segment_hold_forks(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install_fork_handlers);
    pthread_mutex_lock(&handles_lock);
}
void segment_release_forks(void) { pthread_mutex_unlock(&handles_lock); }

void handle_list(pyps_store *s) { s->next = handles, handles = s; }

static pyps_store **place_of(const pyps_store *s) {
    pyps_store **at = &handles;
    while (*at && *at != s) at = &(*at)->next;
    return at;
}

bool handle_end(pyps_store *s) {
    segment_hold_forks();
    pyps_store **at = place_of(s);
    bool listed = *at;
    if (listed) {
        *at = s->next;
        file_close(s->fd, s->file);
        journal_close(s);
    }
    segment_release_forks();
    return listed;
}

bool handle_is_listed(const pyps_store *s) {
    segment_hold_forks();
    bool listed = *place_of(s);
    segment_release_forks();
    return listed;
}

static uint64_t handle_bytes(void) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (sizeof(pyps_store) + page - 1) / page * page;
}

pyps_store *handle_allocate(void) {
    uint64_t bytes = handle_bytes();
    if ((uint64_t)(addresses_end - addresses) < bytes) {
        uint8_t *more = mmap(NULL, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (more == MAP_FAILED) return NULL;
        addresses = more, addresses_end = more + ADDRESSES;
    }
    if (mprotect(addresses, bytes, PROT_READ | PROT_WRITE)) return NULL;
    pyps_store *s = (pyps_store *)(void *)addresses;
    if (__lsan_register_root_region) __lsan_register_root_region(s, bytes);
    addresses += bytes;
    return s;
}

void handle_free(pyps_store *s) {
    mmap(s, handle_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void journal_close(pyps_store *s) {
    if (s->journal >= 0) file_close(s->journal, s->journal_file);
    s->journal = -1;
}

void reading_drop(pyps_store *s) {
    free(s->reading);
    s->reading = NULL;
}

const char *segment_directory(void) {
    const char *dir = getenv("PYPS_SHM_DIR");
    return dir && *dir ? dir : "/dev/shm";
}

int segment_lock_byte(int fd, short type, int64_t byte) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = LOCK_BASE + byte, .l_len = 1};
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return PYPS_OK;
    if (errno == EAGAIN || errno == EACCES) return PYPS_EBUSY;
    return fail(PYPS_ESYS, "locking byte %ld of the segment: %s", byte, strerror(errno));
}

int segment_byte_locked(int fd, int64_t byte) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_BASE + byte, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK ? 0 : 1;
}

int store_check_usable(pyps_store *s, bool joined) {
    if (!s) return fail(PYPS_EINVAL, "store: found NULL");
    if (!s->process)
        return fail(PYPS_EFORKED,
                    "this handle belongs to the parent process; open the store again after fork");
    struct stat status; /* what is behind a file's end cannot be read: SIGBUS */
    if (fstat(s->fd, &status) || !is_of(&status, s->file))
        return fail(PYPS_ESYS, "descriptor %d is not the segment's any more: this process has closed it",
                    s->fd);
    if ((uint64_t)status.st_size < s->layout.bytes)
        return fail(PYPS_ECORRUPT, "the segment was truncated: found %ld bytes; expected %lu",
                    (long)status.st_size, s->layout.bytes);
    if (joined && s->slot == NONE) return fail(PYPS_EINVAL, "not a participant; join first");
    return PYPS_OK;
}

int store_check_worker(pyps_store *s) {
    int rc = store_check_usable(s, true);
    return rc || s->role == PYPS_WORKER ? rc
                                        : fail(PYPS_EINVAL, "an observer takes no steps; join as a worker");
}

uint64_t store_deadline(const pyps_store *s, double timeout_seconds) {
    return timeout_seconds < 0 ? wait_deadline_after((double)s->geometry.round_timeout_nanoseconds * 2e-9)
                               : wait_deadline_after(timeout_seconds);
}

int pyps_set_interrupt(int (*check)(void)) {
    interrupted = check;
    return PYPS_OK;
}

int store_check_interrupt(void) {
    return interrupted && interrupted() ? fail(PYPS_EINTR, "interrupted") : PYPS_OK;
}
