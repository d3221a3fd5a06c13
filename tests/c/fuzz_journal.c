/* fuzz_journal.c: a journal of any bytes is replayed, or is an error, and nothing else.
 *
 * An input is flags, then what is done to a good journal, of one of three policies (bits 2 and 3): patches of 10
 * bytes {8-byte word, 8 bytes}, or (WHOLE) bytes that take the place of its beginning; and (SHORT) a file that ends
 * where the input ends.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

#define WHOLE  1u
#define SHORT  2u
#define ROUNDS 6

static struct good {
    uint32_t policy;
    unsigned char *bytes;
    size_t length;
} goods[] = {{.policy = PYPS_ASP}, {.policy = PYPS_R2SP}, {.policy = PYPS_HPS}};

void pyps_failpoint(const char *name) { (void)name; }

static const char *path_of(int fd) {
    static char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return path;
}

/* One worker of two ranks comes, goes and comes back; the events that carry more than themselves are among them. */
static void run_a_store(struct good *good, const char *journal) {
    static const uint32_t batches[] = {4, 4}, others[] = {3, 5};
    static const pyps_turn turns[] = {{.rank = 1, .gap_seconds = 0}, {.rank = 0, .gap_seconds = 0}};
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {1000}};
    pyps_config config = small_config(&tensor, batches, 2, good->policy);
    pyps_store *s[2];
    pyps_push_result result;
    config.max_participants = 4, config.policy_params.slack = 0;
    must(pyps_create("journal", PYPS_ABI, &config, &s[0]), "create"),
        must(pyps_open("journal", PYPS_ABI, &s[1]), "open");
    for (int i = 0; i < 2; i++)
        must(pyps_journal(s[i], journal), "journal"), must(pyps_join(s[i], PYPS_WORKER, i, NULL), "join");
    for (int i = 0; i < ROUNDS; i++) {
        pyps_claim claim;
        for (int w = 0; w < 2; w++) pyps_start(s[w], 0, &claim);
        push_value_by(s[i % 2], 1, PYPS_F32, 0.001, &result);
        push_value_by(s[1 - i % 2], 1, PYPS_F32, 0.001, &result);
        if (i == 2) {
            must(pyps_replan(s[0], others, 2, PYPS_ANY_PLAN), "replan");
            pyps_set_schedule(s[0], turns, 2, 1);
        }
        if (i == 4) must(pyps_leave(s[1]), "leave"), must(pyps_join(s[1], PYPS_WORKER, 1, NULL), "join");
    }
    must(pyps_close(s[1]), "close"), must(pyps_close(s[0]), "close");
    must(pyps_unlink("journal", 0), "unlink");
}

static void make_good(struct good *good) {
    struct stat status;
    pyps_replay_result result;
    char path[] = "/tmp/pyps-journal-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0, "no file");
    run_a_store(good, path), unlink(path);
    must(pyps_replay(path_of(fd), &result), "replay of what was written");
    CHECK(result.decisions > ROUNDS && !result.differences, "found %s", result.first);
    CHECK(!fstat(fd, &status) && (good->bytes = malloc((size_t)status.st_size)), "no memory");
    good->length = (size_t)status.st_size;
    CHECK(pread(fd, good->bytes, good->length, 0) == status.st_size, "no journal");
    close(fd);
}

int LLVMFuzzerTestOneInput(const unsigned char *input, size_t size) {
    if (!goods[0].bytes)
        for (size_t i = 0; i < sizeof goods / sizeof *goods; i++) make_good(&goods[i]);
    if (!size) return 0;
    const struct good *good = &goods[(input[0] >> 2) % (sizeof goods / sizeof *goods)];
    size_t length = good->length;
    unsigned char *bytes = malloc(length);
    CHECK(bytes, "no memory");
    memcpy(bytes, good->bytes, length);
    if (input[0] & WHOLE) {
        memcpy(bytes, input + 1, size - 1 < length ? size - 1 : length);
        if (input[0] & SHORT && size - 1 < length) length = size - 1;
    } else {
        for (size_t at = 1; at + 10 <= size; at += 10) {
            uint16_t place;
            memcpy(&place, input + at, sizeof place);
            memcpy(bytes + place % (length / 8) * 8, input + at + 2, 8);
        }
        if (input[0] & SHORT) length -= input[0] * 7u % length;
    }
    int fd = memfd_create("journal", 0);
    pyps_replay_result result;
    CHECK(fd >= 0 && write(fd, bytes, length) == (ssize_t)length, "no memory");
    int rc = pyps_replay(path_of(fd), &result);
    CHECK(rc == PYPS_OK || rc == PYPS_ECORRUPT || rc == PYPS_EPOLICY, "found code %d", rc);
    close(fd), free(bytes);
    return 0;
}
