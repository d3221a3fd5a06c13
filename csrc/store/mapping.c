/* mapping.c: a handle's mapping of its segment, and what becomes of staging buffers that it has given up.
 *
 * A worker that leaves may still have pointers to its staging buffers, which are the next worker's by then. So that
 * part of the mapping becomes private memory: what is written there reaches no other process. If the handle joins
 * again it maps the file anew, elsewhere, and the private part stays until the handle is closed.
 *
 * The mapping begins where a huge page would. If PYPS_HUGE_PAGES=1, what is about to get memory gets it as huge pages,
 * where the system has them: whole ones alone, so that no more gets memory than was asked for. What lies before the
 * staging buffers is spread over the nodes of the machine's memory if PYPS_NUMA=interleave; a staging buffer gets its
 * memory from its worker, and so on its worker's node.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "store/segment.h"

#define HUGE_PAGE     (UINT64_C(2) << 20) /* of every x86-64, and of Arm with pages of 4 KiB */
#define MOST_REFUSED  8u                  /* in a row: then the system has none */
#define COLLAPSE      25                  /* MADV_COLLAPSE of Linux 6.1, which older headers lack */
#define INTERLEAVE    3                   /* MPOL_INTERLEAVE; numaif.h is libnuma's */
#define NODES_ALLOWED 4                   /* MPOL_F_MEMS_ALLOWED */
#define MOST_NODES    1024u

static int failed(const char *what) { return fail(PYPS_ESYS, "%s: %s", what, strerror(errno)); }

static void set_pointers(pyps_store *s) {
    s->header = (struct header *)(void *)s->base;
    s->slots = (struct slot *)(void *)(s->base + s->layout.slots);
    s->words = (a64 *)(void *)(s->base + s->layout.words);
    s->saved = (a64 *)(void *)(s->base + s->layout.saved);
    s->owners = (a64 *)(void *)(s->base + s->layout.owners);
    s->view_owners = (a64 *)(void *)(s->base + s->layout.view_owners);
}

/* Room for `bytes` from the beginning of a huge page on, or MAP_FAILED. */
static uint8_t *reserve(uint64_t bytes) {
    uint8_t *found =
        mmap(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return found;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), before = -(uintptr_t)found % HUGE_PAGE;
    uint64_t used = (bytes + page - 1) / page * page;
    if (before) munmap(found, before);
    munmap(found + before + used, HUGE_PAGE - before + bytes - used);
    return found + before;
}

/* A forked child, such as a loader process, does not get the mapping: it could write there by mistake, and a mapping
 * holds the file's locks. So no fork may come between the two calls. `at` NULL: the segment, anywhere; else memory of
 * zeros there. */
static void *map(pyps_store *s, uint8_t *at, uint64_t bytes) {
    int kind = at ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd = at ? -1 : s->fd;
    segment_hold_forks();
    uint8_t *room = at ? at : reserve(bytes);
    void *found = room;
    if (room != MAP_FAILED)
        found = mmap(room, bytes, PROT_READ | PROT_WRITE, kind | MAP_FIXED | MAP_NORESERVE, fd, 0);
    if (room != MAP_FAILED && found == MAP_FAILED && !at) munmap(room, bytes);
    if (found != MAP_FAILED)
        madvise(found, bytes, MADV_DONTDUMP); /* a core file would be as large as the model */
    if (found != MAP_FAILED && madvise(found, bytes, MADV_DONTFORK)) {
        munmap(found, bytes);
        found = MAP_FAILED;
    }
    segment_release_forks();
    return found == MAP_FAILED ? NULL : found;
}

int mapping_make(pyps_store *s) {
    s->base = map(s, NULL, s->layout.bytes);
    if (!s->base) return failed("mapping the segment");
    set_pointers(s);
    return PYPS_OK;
}

/* The system makes no huge page of nothing, so each begins with a small one. */
static bool make_huge_page(const pyps_store *s, uint64_t from) {
    return !posix_fallocate(s->fd, (off_t)from, 1) && !madvise(s->base + from, HUGE_PAGE, COLLAPSE);
}

static void use_huge_pages(const pyps_store *s, uint64_t offset, uint64_t bytes) {
    const char *wanted = getenv("PYPS_HUGE_PAGES");
    uint64_t from = (offset + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    unsigned refused = 0;
    if (!wanted || strcmp(wanted, "1")) return;
    for (; from + HUGE_PAGE <= offset + bytes && refused < MOST_REFUSED; from += HUGE_PAGE)
        refused = make_huge_page(s, from) ? 0 : refused + 1;
}

int mapping_spread(const pyps_store *s, uint64_t bytes) {
    const char *wanted = getenv("PYPS_NUMA");
    unsigned long nodes[MOST_NODES / (8 * sizeof(unsigned long))] = {0};
    if (!wanted || !*wanted) return PYPS_OK;
    if (strcmp(wanted, "interleave"))
        return fail(PYPS_EINVAL, "PYPS_NUMA: found '%.40s'; expected 'interleave' or nothing", wanted);
    if (syscall(SYS_get_mempolicy, NULL, nodes, (unsigned long)MOST_NODES, NULL, NODES_ALLOWED) ||
        syscall(SYS_mbind, s->base, bytes, INTERLEAVE, nodes, (unsigned long)MOST_NODES, 0))
        return failed("PYPS_NUMA: mbind");
    return PYPS_OK;
}

/* In whole pages, which are larger on some machines than the segment's. */
int mapping_detach_staging(pyps_store *s) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE),
             bytes = s->geometry.staging_buffers * s->layout.staging_stride;
    uint64_t first = s->layout.staging + s->slot * bytes, from = (first + page - 1) / page * page;
    uint64_t to = (first + bytes) / page * page;
    s->detached_from = s->detached_to = 0;
    if (from >= to) return PYPS_OK;
    if (!map(s, s->base + from, to - from)) return failed("taking staging buffers out of the mapping");
    s->detached_from = from, s->detached_to = to;
    return PYPS_OK;
}

/* Unmaps all but the detached part, which it remembers. */
static int leave_detached(pyps_store *s, uint8_t *base, uint64_t from, uint64_t to) {
    struct detached *left = malloc(sizeof *left);
    if (!left) return fail(PYPS_ENOSPC, "out of memory for a handle");
    munmap(base, from), munmap(base + to, s->layout.bytes - to);
    *left = (struct detached){.start = base + from, .bytes = to - from, .next = s->detached};
    s->detached = left;
    return PYPS_OK;
}

int mapping_renew(pyps_store *s) {
    uint8_t *before = s->base;
    uint64_t from = s->detached_from, to = s->detached_to;
    if (!to) return PYPS_OK;
    int rc = mapping_make(s);
    if (rc) s->base = before;
    else if (!(rc = leave_detached(s, before, from, to))) s->detached_from = s->detached_to = 0;
    return rc;
}

void mapping_end(pyps_store *s) {
    if (s->base) munmap(s->base, s->layout.bytes);
    while (s->detached) {
        struct detached *next = s->detached->next;
        munmap(s->detached->start, s->detached->bytes);
        free(s->detached);
        s->detached = next;
    }
}

int segment_allocate(pyps_store *s, uint64_t offset, uint64_t bytes) {
    int error;
    if (s->base) use_huge_pages(s, offset, bytes);
    do error = posix_fallocate(s->fd, (off_t)offset, (off_t)bytes);
    while (error == EINTR);
    if (!error) return PYPS_OK;
    if (error == ENOSPC)
        return fail(PYPS_ENOSPC,
                    "%s: no room for %lu MiB more; enlarge it (Docker: --shm-size) or set PYPS_SHM_DIR",
                    segment_directory(), (bytes >> 20) + 1);
    return fail(PYPS_ESYS, "%s: allocating %lu bytes: %s", segment_directory(), bytes, strerror(error));
}

void segment_release(pyps_store *s, uint64_t offset, uint64_t bytes) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), from = (offset + page - 1) / page * page;
    uint64_t to = (offset + bytes) / page * page;
    if (from < to)
        fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)(to - from));
}
