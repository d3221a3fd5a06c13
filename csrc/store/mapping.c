/* mapping.c: a handle's mapping of its segment, and what becomes of staging buffers that it has given up.
 *
 * A worker that leaves may still have pointers to its staging buffers, which are the next worker's by then. So that
 * part of the mapping becomes private memory: what is written there reaches no other process. If the handle joins
 * again it maps the file anew, elsewhere, and the private part stays until the handle is closed.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "store/segment.h"
#include "store/store.h"

static int failed(const char *what) { return fail(PYPS_ESYS, "%s: %s", what, strerror(errno)); }

static void set_pointers(pyps_store *s) {
    s->header = (struct header *)(void *)s->base;
    s->slots = (struct slot *)(void *)(s->base + s->layout.slots);
    s->words = (a64 *)(void *)(s->base + s->layout.words);
    s->saved = (a64 *)(void *)(s->base + s->layout.saved);
    s->owners = (a64 *)(void *)(s->base + s->layout.owners);
    s->view_owners = (a64 *)(void *)(s->base + s->layout.view_owners);
}

/* A forked child, such as a loader process, does not get the mapping: it could write there by mistake, and a mapping
 * holds the file's locks. So no fork may come between the two calls. `at` NULL: the segment, anywhere; else memory of
 * zeros there. */
static void *map(pyps_store *s, uint8_t *at, uint64_t bytes) {
    int kind = at ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED : MAP_SHARED, fd = at ? -1 : s->fd;
    segment_hold_forks();
    void *found = mmap(at, bytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, fd, 0);
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
