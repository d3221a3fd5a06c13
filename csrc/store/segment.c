/* segment.c: the file of a store: made whole or not at all, opened without trust, removed when unused.
 *
 * A new segment is written into an unnamed file and linked under its name when it is ready. So no process
 * ever opens half a segment, and a creator that is killed leaves nothing. Every handle keeps a read lock on
 * one byte of the file (an open file description lock, which ends with the process); unlink asks for the
 * write lock.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/stores.h"

#define NAME_LIMIT 200u

static int path_of(const char *name, char *path, size_t capacity) {
    size_t length = name ? strlen(name) : 0;
    size_t legal =
        name ? strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") : 0;
    if (!length || length > NAME_LIMIT || legal != length)
        return fail(PYPS_EINVAL, "name: found '%.60s'; expected 1 to %u letters, digits, '.', '_' or '-'",
                    name ? name : "(null)", NAME_LIMIT);
    if ((size_t)snprintf(path, capacity, "%s/pyps-%s", segment_directory(), name) >= capacity)
        return fail(PYPS_EINVAL, "PYPS_SHM_DIR: longer than %zu characters", capacity - NAME_LIMIT - 8);
    return PYPS_OK;
}

static int map_failed(const char *what) {
    return fail(PYPS_ESYS, "%s in %s: %s", what, segment_directory(), strerror(errno));
}

static struct view_config view_config_of(const struct geometry *g, const uint32_t *batches) {
    return (struct view_config){.participants = g->max_participants,
                                .ranks = g->ranks,
                                .staging_buffers = g->staging_buffers,
                                .policy = g->policy,
                                .policy_params = g->policy_params,
                                .samples = g->samples,
                                .round_timeout = g->round_timeout_nanoseconds,
                                .batches = batches};
}

/* Maps the file and derives pointers and tables; geometry and layout are known. */
static int map_segment(pyps_store *s, const pyps_tensor *tensors, const struct group *groups) {
    const struct geometry *g = &s->geometry;
    int rc = mapping_make(s);
    if (rc) return rc;
    s->policy = policy_find(g->policy);
    s->looks_at_gradients = s->policy->needs_sketch && s->policy->needs_sketch(&g->policy_params);
    s->tensors = malloc(g->tensors * sizeof *s->tensors);
    s->chunks = calloc(g->chunks, sizeof *s->chunks);
    s->stream.marks = calloc(g->chunks, sizeof *s->stream.marks);
    s->sources = calloc(g->max_participants, sizeof *s->sources);
    s->expected = view_allocate(s), s->draft = view_allocate(s);
    uint32_t *ones = calloc(g->ranks, sizeof *ones);
    if (!s->tensors || !s->chunks || !s->stream.marks || !s->sources || !s->expected || !s->draft || !ones) {
        free(ones);
        return fail(PYPS_ENOSPC, "out of memory for a handle");
    }
    memcpy(s->tensors, tensors, g->tensors * sizeof *tensors);
    struct view_config view_config = view_config_of(g, ones);
    view_init(s->expected, &view_config);
    free(ones);
    for (uint32_t i = 0; i < g->groups; i++)
        for (uint32_t c = 0; c < groups[i].chunks; c++) {
            uint64_t left = groups[i].elements - (uint64_t)c * g->chunk_params;
            uint32_t length = left < g->chunk_params ? (uint32_t)left : g->chunk_params;
            bool averaged = groups[i].kind == PYPS_AVERAGED;
            s->chunks[groups[i].first_chunk + c] = (struct chunk){i, length, averaged};
            s->trained += averaged ? 0 : g->chunk_params;
        }
    return PYPS_OK;
}

/* With forks held. NULL: out of memory; the file is closed. */
static pyps_store *new_handle(int fd) {
    pyps_store *s = handle_allocate();
    if (!s) {
        close(fd);
        return fail(PYPS_ENOSPC, "out of memory for a handle"), NULL;
    }
    handle_list(s);
    s->fd = fd, s->file = file_behind(fd), s->process = getpid();
    s->slot = s->private_view = s->private_buffer = s->reclaims = NONE;
    s->rank = s->journal = -1, s->hands = 1;
    for (size_t i = 0; i < sizeof s->free_cache / sizeof *s->free_cache; i++) s->free_cache[i] = NONE;
    return s;
}

static void destroy(pyps_store *s) {
    crew_end(s, NULL);
    handle_end(s);
    mapping_end(s);
    reading_drop(s);
    free(s->tensors), free(s->path), free(s->chunks), free(s->stream.marks), free(s->chunk_floats),
        free(s->sources), free(s->expected), free(s->draft);
    handle_free(s);
}

int pyps_close(pyps_store *s) {
    if (!s) return PYPS_OK;
    bool open = handle_is_listed(s);
    if (open &&
        !s->process) { /* the memory stays: a thread of the parent may have been freeing it at the fork */
        handle_end(s);
        return PYPS_OK;
    }
    if (!open) return fail(PYPS_EINVAL, "close: the handle is closed already");
    int rc = s->slot != NONE ? participant_leave(s) : PYPS_OK;
    destroy(s);
    return rc;
}

/* A caller that was compiled with another pyps.h has structs of other sizes, and would be written over. One from before
 * this argument gives a pointer in its place. */
static int check_abi(uint32_t abi) {
    if (abi == PYPS_ABI) return PYPS_OK;
    return fail(PYPS_EABI, "abi: found %u; expected %u: compile with this library's pyps.h", abi, PYPS_ABI);
}

/* ---- create ---- */

static int write_segment(pyps_store *s, const pyps_config *config, const pyps_state *state,
                         const pyps_tensor *tensors, const struct group *groups) {
    const struct geometry *g = &s->geometry;
    struct header *h = s->header;
    memcpy(s->base + s->layout.tensors, tensors, g->tensors * sizeof *tensors);
    memcpy(s->base + s->layout.groups, groups, g->groups * sizeof *groups);
    for (uint32_t b = 0; b < s->layout.buffer_count; b++) {
        uint32_t holder = b < s->layout.common_buffers ? HOLDER_NONE : HOLDER_ABSENT;
        store_relaxed(&s->owners[b], owner_make(0, holder, b < g->chunks ? b : OWNER_CHUNK_NONE));
    }
    struct view_config view_config = view_config_of(g, config->batches);
    struct view *view = (struct view *)(void *)(s->base + s->layout.views);
    view_init(view, &view_config);
    int rc = contents_write(s, config, state, tensors, view);
    if (rc) return rc;
    memcpy(h->magic, SEGMENT_MAGIC, sizeof h->magic);
    h->endian = ENDIAN_MARK, h->abi = PYPS_ABI, h->bytes = s->layout.bytes, h->geometry = *g;
    h->checksum = geometry_checksum(g, tensors, groups), h->clock_offset = wait_clock_offset();
    if (getentropy(&h->drawn, sizeof h->drawn)) return map_failed("drawing its number");
    store_relaxed(&h->next_id, 1);
    store32_release(&h->state, SEGMENT_READY);
    return PYPS_OK;
}

static int build(pyps_store *s, const pyps_config *config, const pyps_state *state, const char *path,
                 const pyps_tensor *tensors, const struct group *groups) {
    char unnamed[64];
    const struct layout *l = &s->layout;
    uint64_t views = l->views + l->views_allocated * l->view_stride;
    int rc;
    if (ftruncate(s->fd, (off_t)s->layout.bytes)) return map_failed("sizing the segment");
    if ((rc = map_segment(s, tensors, groups)) || (rc = mapping_spread(s, s->layout.staging)) ||
        (rc = segment_allocate(s, 0, views)) ||
        (rc = segment_allocate(s, l->buffers, l->common_buffers * l->buffer_stride)) ||
        (rc = segment_lock_byte(s->fd, F_RDLCK, ATTACHED_BYTE)) ||
        (rc = write_segment(s, config, state, tensors, groups)))
        return rc;
    snprintf(unnamed, sizeof unnamed, "/proc/self/fd/%d", s->fd);
    if (linkat(AT_FDCWD, unnamed, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0) return PYPS_OK;
    if (errno == EEXIST) return fail(PYPS_EEXIST, "%s: exists; open it, or remove it with pyps shm gc", path);
    return map_failed("naming the segment");
}

static int create(const char *name, uint32_t abi, const pyps_config *config, const pyps_state *state,
                  pyps_store **out) {
    char path[4096];
    struct geometry geometry;
    struct layout layout;
    pyps_tensor *tensors = NULL;
    struct group *groups = NULL;
    int rc = check_abi(abi);
    if (rc || (rc = require(out))) return rc;
    *out = NULL;
    if ((rc = path_of(name, path, sizeof path)) ||
        (rc = geometry_from_config(config, &geometry, &tensors, &groups)))
        return rc;
    pyps_store *s = NULL;
    if ((rc = layout_compute(&geometry, &layout)) == PYPS_OK) {
        segment_hold_forks();
        int fd = open(segment_directory(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        if (fd < 0) rc = map_failed("creating a segment");
        else if (!(s = new_handle(fd))) rc = PYPS_ENOSPC;
        segment_release_forks();
    }
    if (!rc) {
        if (state) geometry.rounding_seed = state->rounding_seed;
        s->geometry = geometry, s->layout = layout, s->path = strdup(path);
        rc = build(s, config, state, path, tensors, groups);
    }
    free(tensors), free(groups);
    if (rc && s) destroy(s);
    if (!rc) *out = s;
    return rc;
}

int pyps_create(const char *name, uint32_t abi, const pyps_config *config, pyps_store **out) {
    return create(name, abi, config, NULL, out);
}

int pyps_restore(const char *name, uint32_t abi, const pyps_config *config, const pyps_state *state,
                 pyps_store **out) {
    pyps_state copy;
    int rc = check_abi(abi);
    if (!rc) rc = read_struct("state", state, residuals, &copy);
    return rc ? rc : create(name, abi, config, &copy, out);
}

/* ---- open ---- */

static int open_file(const char *name, int *fd_out, struct stat *status) {
    char path[4096];
    int rc = path_of(name, path, sizeof path);
    if (rc) return rc;
    int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        if (errno == ENOENT) return fail(PYPS_ENOENT, "%s: no such segment", path);
        if (errno == EACCES || errno == EPERM) return fail(PYPS_EPERM, "%s: belongs to another user", path);
        bool wrong = errno == ELOOP || errno == ENXIO || errno == EISDIR || errno == ENODEV;
        return wrong ? fail(PYPS_ECORRUPT, "%s: not a segment: %s", path, strerror(errno))
                     : fail(PYPS_ESYS, "%s: %s", path, strerror(errno));
    }
    if (fstat(fd, status)) rc = map_failed("examining the segment");
    else if (!S_ISREG(status->st_mode)) rc = fail(PYPS_ECORRUPT, "%s: not a regular file", path);
    else if (status->st_uid != geteuid())
        rc = fail(PYPS_EPERM, "%s: found owner %u; expected %u", path, status->st_uid, geteuid());
    else if (status->st_mode & 077)
        rc = fail(PYPS_EPERM, "%s: found mode %o; expected 600: others could change it", path,
                  status->st_mode & 0777);
    if (rc) close(fd);
    else *fd_out = fd;
    return rc;
}

/* Uses pread, not a mapping: a file that is shorter than its header says must not raise SIGBUS. */
static int read_exactly(int fd, void *to, uint64_t bytes, uint64_t offset, const char *what) {
    if (pread(fd, to, bytes, (off_t)offset) == (ssize_t)bytes) return PYPS_OK;
    return fail(PYPS_ECORRUPT, "%s: the file ends too early; the segment is truncated", what);
}

static int check_header(const struct header *h, uint64_t size, struct layout *layout) {
    if (memcmp(h->magic, SEGMENT_MAGIC, sizeof h->magic))
        return fail(PYPS_ECORRUPT, "magic: not a pyps segment");
    if (h->endian != ENDIAN_MARK)
        return fail(PYPS_EABI, "endian: found %08x; expected %08x: from a machine of another byte order",
                    h->endian, ENDIAN_MARK);
    if (h->abi != PYPS_ABI) return fail(PYPS_EABI, "abi: found %u; expected %u", h->abi, PYPS_ABI);
    if (load32_acquire(&h->state) != SEGMENT_READY)
        return fail(PYPS_ENOTREADY, "state: the segment is not ready");
    if (h->bytes != size)
        return fail(PYPS_ECORRUPT, "bytes: the file has %lu; its header says %lu", size, h->bytes);
    if (h->clock_offset != wait_clock_offset())
        return fail(PYPS_EABI,
                    "clock_offset: found %ld ns; expected %ld: its creator is in another time namespace",
                    h->clock_offset, wait_clock_offset());
    int rc = layout_compute(&h->geometry, layout);
    if (rc == PYPS_EPOLICY) return rc;
    if (rc || layout->bytes != size)
        return fail(PYPS_ECORRUPT, "geometry: does not give a file of %lu bytes", size);
    return PYPS_OK;
}

static int attach(pyps_store *s, uint64_t size) {
    struct header header;
    int rc = read_exactly(s->fd, &header, sizeof header, 0, "header");
    if (rc || (rc = check_header(&header, size, &s->layout))) return rc;
    s->geometry = header.geometry;
    pyps_tensor *tensors = malloc(s->geometry.tensors * sizeof *tensors);
    struct group *groups = malloc(s->geometry.groups * sizeof *groups);
    if (!tensors || !groups) rc = fail(PYPS_ENOSPC, "out of memory for the tensor table");
    if (!rc)
        rc =
            read_exactly(s->fd, tensors, s->geometry.tensors * sizeof *tensors, s->layout.tensors, "tensors");
    if (!rc)
        rc = read_exactly(s->fd, groups, s->geometry.groups * sizeof *groups, s->layout.groups, "groups");
    if (!rc && (geometry_checksum(&s->geometry, tensors, groups) != header.checksum ||
                !geometry_tables_valid(&s->geometry, tensors, groups)))
        rc = fail(PYPS_ECORRUPT, "checksum: geometry, tensors or groups are damaged");
    if (!rc) rc = map_segment(s, tensors, groups);
    free(tensors), free(groups);
    return rc;
}

int pyps_open(const char *name, uint32_t abi, pyps_store **out) {
    int fd = -1;
    struct stat status;
    char path[4096];
    pyps_store *s = NULL;
    int rc = check_abi(abi);
    if (rc || (rc = require(out))) return rc;
    *out = NULL;
    segment_hold_forks();
    rc = open_file(name, &fd, &status);
    if (!rc && !(s = new_handle(fd))) rc = PYPS_ENOSPC;
    segment_release_forks();
    if (rc) return rc;
    FAILPOINT("open.begun");
    rc = segment_lock_byte(fd, F_RDLCK, ATTACHED_BYTE);
    if (rc == PYPS_EBUSY) fail(rc, "%s: is being removed", name);
    /* Removed between open and lock? Then no other process can open it. */
    if (!rc && (fstat(fd, &status) || status.st_nlink == 0)) rc = fail(PYPS_ENOENT, "%s: was removed", name);
    if (!rc) rc = attach(s, (uint64_t)status.st_size);
    if (!rc && !path_of(name, path, sizeof path)) s->path = strdup(path);
    if (rc) destroy(s);
    else *out = s;
    return rc;
}

/* ---- remove ---- */

/* Removes a name that is this file's. Every remover locks the file first, so the name stays this file's between the
 * look at it and its end. */
static int remove_name(int fd, const char *path) {
    struct stat own, named;
    int rc = segment_lock_byte(fd, F_WRLCK, REMOVER_BYTE);
    if (rc == PYPS_EBUSY) return fail(rc, "%s: another process is removing it", path);
    if (rc) return rc;
    if (fstat(fd, &own) || own.st_nlink == 0 || lstat(path, &named) || own.st_ino != named.st_ino ||
        own.st_dev != named.st_dev)
        rc = fail(PYPS_ENOENT, "%s: was removed", path);
    FAILPOINT("unlink.checked");
    if (!rc && unlink(path)) rc = fail(PYPS_ESYS, "%s: %s", path, strerror(errno));
    segment_lock_byte(fd, F_UNLCK, REMOVER_BYTE);
    return rc;
}

int pyps_unlink(const char *name, int force) {
    char path[4096];
    int fd;
    struct stat status;
    int rc = open_file(name, &fd, &status);
    if (rc) return rc;
    FAILPOINT("unlink.all_joined");
    rc = force ? PYPS_OK : segment_lock_byte(fd, F_WRLCK, ATTACHED_BYTE);
    if (rc == PYPS_EBUSY) fail(rc, "%s: a live process has it open", name);
    if (!rc && !(rc = path_of(name, path, sizeof path))) rc = remove_name(fd, path);
    close(fd);
    return rc;
}

int pyps_remove(pyps_store *s) {
    int rc = store_check_usable(s, false);
    if (rc) return rc;
    if (!s->path) return fail(PYPS_ENOSPC, "out of memory for the name of the segment");
    return remove_name(s->fd, s->path);
}

int pyps_probe(const char *name, uint64_t *bytes_out) {
    int fd;
    struct stat status;
    char magic[8] = {0};
    int rc = require(bytes_out);
    if (rc || (rc = open_file(name, &fd, &status))) return rc;
    *bytes_out = (uint64_t)status.st_blocks * 512;
    if (pread(fd, magic, sizeof magic, 0) != sizeof magic || memcmp(magic, SEGMENT_MAGIC, sizeof magic))
        rc = fail(PYPS_ECORRUPT, "%s: not a pyps segment", name);
    else if (segment_byte_locked(fd, ATTACHED_BYTE))
        rc = fail(PYPS_EBUSY, "%s: a live process has it open", name);
    close(fd);
    return rc;
}
