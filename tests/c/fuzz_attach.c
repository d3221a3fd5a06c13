/* fuzz_attach.c: a segment of any bytes is an error or is used, and nothing else.
 *
 * An input is flags, then what is done to a good segment, of one of four policies (bits 2 and 3), which workers with
 * threads use (CREW) or without: patches of
 * 11 bytes {region, place / 4, 8 bytes}, or (WHOLE) bytes that take the place of the file's beginning; and
 * (SHORT) a file that ends where the input ends. What can be opened is joined by two, read, pushed to and
 * reaped, with deadlines, as its owners would do.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

#define WHOLE   1u
#define SHORT   2u
#define CREW    16u
#define SECONDS 0.001

#define FIELDS_FROM 12u /* these regions are 8 bytes, from one field of the current view on */
#define REGIONS     16u

static struct good {
    uint32_t policy, ranks;
    unsigned char *bytes;
    size_t length;
    struct {
        uint64_t at, bytes;
    } regions[REGIONS]; /* patches name them, so that a corpus outlives a change of the layout */
} goods[] = {{.policy = PYPS_ASP, .ranks = 1},
             {.policy = PYPS_BSP, .ranks = 2},
             {.policy = PYPS_HPS, .ranks = 3},
             {.policy = PYPS_R2SP, .ranks = 3}};
static unsigned char *damaged;
static char folder[] = "/dev/shm/fuzz-pyps-XXXXXX";
static char path[256];

void pyps_failpoint(const char *name) { (void)name; }

static void leave(void) { rmdir(folder); }

static void find_regions(const pyps_store *s, struct good *g) {
    const struct layout *l = &s->layout;
    uint64_t view = l->views + word_buffer(load_seq(&s->header->view)) * l->view_stride;
    uint64_t starts[] = {0,         l->tensors,     l->groups, l->slots,   l->words,   l->saved,
                         l->owners, l->view_owners, l->views,  l->buffers, l->staging, l->bytes};
    for (size_t r = 0; r + 1 < FIELDS_FROM; r++)
        g->regions[r].at = starts[r], g->regions[r].bytes = starts[r + 1] - starts[r];
    g->regions[FIELDS_FROM - 1].at = view, g->regions[FIELDS_FROM - 1].bytes = l->view_stride;
    const struct view *v = (const struct view *)(const void *)(s->base + view);
    const void *fields[] = {&v->outstanding, &view_member(v, g->ranks - 1)->state,
                            &view_member(v, v->participants - 1)->state,
                            &view_rank(v, g->ranks - 1)->slot_plus_1};
    for (size_t f = 0; FIELDS_FROM + f < REGIONS; f++)
        g->regions[FIELDS_FROM + f].at = (uint64_t)((const uint8_t *)fields[f] - s->base),
                                 g->regions[FIELDS_FROM + f].bytes = 8;
}

static float flat[1u << 20];

/* Each pushes, or gives it up in time, in an open round or before its turn, and pulls. */
static void push_each(pyps_store *const *stores, uint32_t count, uint32_t codec, double seconds) {
    pyps_push_result result;
    uint64_t version;
    for (uint32_t i = 0; i < count; i++) {
        if (push_value_by(stores[i], 1, codec, seconds, &result)) pyps_rejoin(stores[i]);
        pyps_pull(stores[i], flat, &version);
    }
}

static void make_good(struct good *g) {
    static size_t most;
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {1500}};
    uint32_t batches[] = {2, 2, 2};
    pyps_config config = small_config(&tensor, batches, g->ranks, g->policy);
    config.max_participants = g->ranks + 2, config.snapshot_spares = 1, config.samples = 100;
    config.staging_buffers = g->ranks == 1 ? 1 : 2;
    config.master = g->policy == PYPS_R2SP ? PYPS_BF16 : PYPS_F32;
    config.round_timeout_seconds = SECONDS;
    pyps_store *stores[3];
    must(pyps_create("fuzz", PYPS_ABI, &config, &stores[0]), "create");
    for (uint32_t i = 1; i < g->ranks; i++) must(pyps_open("fuzz", PYPS_ABI, &stores[i]), "open");
    for (uint32_t i = 0; i < g->ranks; i++) must(pyps_join(stores[i], PYPS_WORKER, (int)i, NULL), "join");
    for (uint32_t codec = 0; codec < 4; codec++) push_each(stores, g->ranks, codec, 0);
    push_each(stores, g->ranks - 1, PYPS_F32, 0);
    find_regions(stores[0], g);
    struct stat status;
    CHECK(!fstat(stores[0]->fd, &status), "no size");
    g->length = (size_t)status.st_size;
    g->bytes = malloc(g->length), damaged = realloc(damaged, most > g->length ? most : g->length);
    CHECK(g->bytes && damaged, "no memory for %zu bytes", g->length);
    if (most < g->length) most = g->length;
    /* As processes that were killed leave it, in the middle of a round or a turn. */
    CHECK(pread(stores[0]->fd, g->bytes, g->length, 0) == (ssize_t)g->length, "segment not read");
    for (uint32_t i = g->ranks; i-- > 0;) must(pyps_close(stores[i]), "close");
    must(pyps_unlink("fuzz", 0), "unlink");
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *given = getenv("PYPS_SHM_DIR"); /* the caller cleans it up, also after a fault */
    if (!given) {
        CHECK(mkdtemp(folder), "no folder under /dev/shm");
        atexit(leave);
        setenv("PYPS_SHM_DIR", folder, 1);
    }
    snprintf(path, sizeof path, "%s/pyps-fuzz", given ? given : folder);
    for (size_t g = 0; g < sizeof goods / sizeof *goods; g++) make_good(&goods[g]);
    return 0;
}

/* The claim after the last one that a worker has; one that was lost; and as those that name none. */
static void claim_ahead(pyps_store *s) {
    pyps_claim claim;
    uint64_t after = pyps_start(s, 0, &claim) ? 0 : claim.first;
    for (int i = 0; i < 2; i++)
        if (!pyps_start_ahead(s, after, &claim) && i) after = claim.first;
    pyps_start_ahead(s, after, &claim), pyps_start_ahead(s, UINT64_MAX, &claim);
}

static void use(pyps_store *s, bool crew) {
    uint64_t version, sequence;
    pyps_layout layout;
    pyps_tensor tensor;
    pyps_status status;
    pyps_member members[8];
    pyps_rank ranks[8];
    int advice;
    pyps_store *both[2] = {s, NULL};
    uint32_t count;
    if (pyps_get_layout(s, &layout) || layout.flat_elements > sizeof flat / sizeof *flat) return;
    for (uint32_t t = 0; t < layout.tensors && t < 8; t++) pyps_get_tensor(s, t, &tensor);
    if (crew) pyps_set_threads(s, 3, NULL);
    if (pyps_join(s, PYPS_WORKER, -1, NULL)) return;
    pyps_get_members(s, members, 8, &count), pyps_get_ranks(s, ranks, 8);
    sequence = pyps_get_status(s, &status) ? 0 : status.sequence;
    pyps_pull(s, flat, &version);
    pyps_snapshot(s, flat, NULL, NULL, SECONDS, &version);
    uint32_t two = !pyps_open("fuzz", PYPS_ABI, &both[1]) && !pyps_join(both[1], PYPS_WORKER, -1, NULL);
    push_each(both, 1 + two, PYPS_F32, SECONDS), push_each(both, 1 + two, PYPS_INT8, 0);
    pyps_should_continue(s, 1, 1, &advice), claim_ahead(s);
    pyps_close(both[1]);
    pyps_reap(s, &count);
    pyps_wait(s, sequence, SECONDS);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size) {
    if (!size) return 0;
    unsigned flags = *data++;
    const struct good *g = &goods[flags >> 2 & 3];
    size_t length = g->length, bytes = length;
    size--;
    memcpy(damaged, g->bytes, length);
    if (flags & WHOLE) memcpy(damaged, data, size < length ? size : length);
    for (; !(flags & WHOLE) && size >= 11; data += 11, size -= 11) {
        uint16_t place;
        size_t region = data[0] % REGIONS;
        memcpy(&place, data + 1, sizeof place);
        uint64_t at = g->regions[region].at + 4 * (uint64_t)place % g->regions[region].bytes;
        memcpy(damaged + at, data + 3, at + 8 <= length ? 8 : length - at);
    }
    if (flags & SHORT && size < bytes) bytes = size;
    int fd = open(path, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, damaged, bytes) == (ssize_t)bytes, "segment not written");
    close(fd);
    pyps_store *store;
    if (pyps_open("fuzz", PYPS_ABI, &store) == PYPS_OK) {
        use(store, flags & CREW);
        pyps_close(store);
    }
    unlink(path);
    return 0;
}
