/* fuzz_attach.c: a segment of any bytes is an error or is used, and nothing else.
 *
 * An input is flags, then what is done to a good segment: patches of 11 bytes {region, place / 4, 8 bytes},
 * or (WHOLE) bytes that take the place of the file's beginning; and (SHORT) a file that ends where the input
 * ends. What can be opened is joined, read, pushed to and reaped, with deadlines, as its owner would do.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

#define WHOLE   1u
#define SHORT   2u
#define SECONDS 0.002

static unsigned char *good, *damaged;
static size_t length;
static struct {
    uint64_t at, bytes;
} regions[12]; /* patches name them, so that a corpus outlives a change of the layout */
static char folder[] = "/dev/shm/fuzz-pyps-XXXXXX";
static char path[256];

void pyps_failpoint(const char *name) { (void)name; }

static void leave(void) { rmdir(folder); }

static void find_regions(const pyps_store *s) {
    const struct layout *l = &s->layout;
    uint64_t view = l->views + word_buffer(load_seq(&s->header->view)) * l->view_stride;
    uint64_t starts[] = {0,         l->tensors,     l->groups, l->slots,   l->words,   l->saved,
                         l->owners, l->view_owners, l->views,  l->buffers, l->staging, l->bytes};
    for (size_t r = 0; r < 11; r++) regions[r].at = starts[r], regions[r].bytes = starts[r + 1] - starts[r];
    regions[11].at = view, regions[11].bytes = l->view_stride;
}

static void make_good(void) {
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {1500}};
    uint32_t batches[] = {2};
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    config.max_participants = 3, config.snapshot_spares = 1, config.areas = 1, config.samples = 100;
    config.round_timeout_seconds = SECONDS;
    pyps_store *store;
    pyps_push_result result;
    must(pyps_create("fuzz", &config, &store), "create");
    must(pyps_join(store, PYPS_WORKER, 0, NULL), "join");
    for (uint32_t codec = 0; codec < 4; codec++) must(push_value(store, 1, codec, &result), "push");
    find_regions(store);
    struct stat status;
    CHECK(!fstat(store->fd, &status), "no size");
    length = (size_t)status.st_size;
    good = malloc(length), damaged = malloc(length);
    CHECK(good && damaged, "no memory for %zu bytes", length);
    /* As a process that was killed leaves it, its staging half written. */
    CHECK(pread(store->fd, good, length, 0) == (ssize_t)length, "segment not read");
    must(pyps_close(store), "close");
    must(pyps_unlink("fuzz", 0), "unlink");
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *given = getenv("PYPS_SHM_DIR"); /* whose giver cleans up, also after a fault */
    if (!given) {
        CHECK(mkdtemp(folder), "no folder under /dev/shm");
        atexit(leave);
        setenv("PYPS_SHM_DIR", folder, 1);
    }
    snprintf(path, sizeof path, "%s/pyps-fuzz", given ? given : folder);
    make_good();
    return 0;
}

static void use(pyps_store *s) {
    static float flat[1u << 20];
    uint64_t version, sequence;
    pyps_layout layout;
    pyps_tensor tensor;
    pyps_status status;
    pyps_member members[8];
    pyps_rank ranks[8];
    pyps_push_result result;
    uint32_t count;
    if (pyps_get_layout(s, &layout) || layout.flat_elements > sizeof flat / sizeof *flat) return;
    for (uint32_t t = 0; t < layout.tensors && t < 8; t++) pyps_get_tensor(s, t, &tensor);
    if (pyps_join(s, PYPS_WORKER, -1, NULL)) return;
    pyps_get_members(s, members, 8, &count), pyps_get_ranks(s, ranks, 8);
    sequence = pyps_get_status(s, &status) ? 0 : status.sequence;
    pyps_pull(s, flat, &version);
    pyps_snapshot(s, flat, NULL, NULL, SECONDS, &version);
    for (uint32_t codec = 0; codec < 6; codec += 3) push_value_by(s, 1, codec, SECONDS, &result);
    pyps_reap(s, &count);
    pyps_wait(s, sequence, SECONDS);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
    if (!size) return 0;
    unsigned flags = *data++;
    size_t bytes = length;
    size--;
    memcpy(damaged, good, length);
    if (flags & WHOLE) memcpy(damaged, data, size < length ? size : length);
    for (; !(flags & WHOLE) && size >= 11; data += 11, size -= 11) {
        uint16_t place;
        size_t region = data[0] % (sizeof regions / sizeof *regions);
        memcpy(&place, data + 1, sizeof place);
        uint64_t at = regions[region].at + 4 * (uint64_t)place % regions[region].bytes;
        memcpy(damaged + at, data + 3, at + 8 <= length ? 8 : length - at);
    }
    if (flags & SHORT && size < bytes) bytes = size;
    int fd = open(path, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, damaged, bytes) == (ssize_t)bytes, "segment not written");
    close(fd);
    pyps_store *store;
    if (pyps_open("fuzz", &store) == PYPS_OK) {
        use(store);
        pyps_close(store);
    }
    unlink(path);
    return 0;
}
