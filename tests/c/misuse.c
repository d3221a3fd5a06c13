/* misuse.c: calls that are wrong, and segments that change under an open handle: errors, not crashes.
 *
 * Usage: misuse NAME. Each case makes its own store, of one chunk, which the calling process has joined.
 */
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

void pyps_failpoint(const char *name) { (void)name; }

static const uint32_t batches[] = {4};
static const pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};

static pyps_store *created(void) {
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    pyps_store *s;
    must(pyps_create("misuse", PYPS_ABI, &config, &s), "create");
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    return s;
}

#define REFUSED(call) expect(call, PYPS_EINVAL, #call)

static void null_handles(void) {
    float flat[FLAT];
    uint64_t version;
    uint32_t count;
    REFUSED(pyps_join(NULL, PYPS_WORKER, -1, NULL));
    REFUSED(pyps_leave(NULL));
    REFUSED(pyps_rejoin(NULL));
    REFUSED(pyps_reap(NULL, &count));
    REFUSED(pyps_stage(NULL, 1, &count));
    REFUSED(pyps_pull(NULL, flat, &version));
    REFUSED(pyps_pull_encoded(NULL, PYPS_INT8, flat, sizeof flat, &version));
    REFUSED(pyps_remove(NULL));
    REFUSED(pyps_state_end(NULL));
    REFUSED(pyps_wait(NULL, 0, 0));
    CHECK(!pyps_staging(NULL, 0) && !pyps_staging_codes(NULL, 0, 0), "staging of no store");
}

static void null_results(pyps_store *s) {
    float flat[FLAT];
    uint64_t version;
    REFUSED(pyps_start(s, 1, NULL));
    REFUSED(pyps_start_ahead(s, 0, NULL));
    REFUSED(pyps_stage(s, 1, NULL));
    REFUSED(pyps_pull(s, NULL, &version));
    REFUSED(pyps_pull(s, flat, NULL));
    REFUSED(pyps_pull_encoded(s, PYPS_INT8, NULL, pyps_encoded_bytes(PYPS_INT8, FLAT), &version));
    REFUSED(pyps_should_continue(s, 1, 1, NULL));
    REFUSED(pyps_snapshot(s, NULL, NULL, NULL, 1, &version));
    REFUSED(pyps_snapshot(s, flat, NULL, NULL, 1, NULL));
    REFUSED(pyps_get_layout(s, NULL));
    REFUSED(pyps_get_tensor(s, 0, NULL));
    REFUSED(pyps_get_status(s, NULL));
    REFUSED(pyps_get_members(s, NULL, 8, NULL));
    REFUSED(pyps_get_ranks(s, NULL, 1));
    REFUSED(pyps_get_hyper(s, NULL, 1));
    REFUSED(pyps_get_ticket(s, 1, NULL));
    REFUSED(pyps_get_policy_params(s, NULL));
    REFUSED(pyps_state_begin(s, 1, NULL));
}

static void null_arguments(void) {
    pyps_store *s = created(), *other;
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    pyps_push_args args = {.size = sizeof args};
    pyps_push_result result;
    uint64_t version;
    float flat[FLAT];
    null_handles(), null_results(s);
    REFUSED(pyps_create("other", PYPS_ABI, NULL, &other));
    REFUSED(pyps_create("other", PYPS_ABI, &config, NULL));
    REFUSED(pyps_create(NULL, PYPS_ABI, &config, &other));
    REFUSED(pyps_open("misuse", PYPS_ABI, NULL));
    REFUSED(pyps_open(NULL, PYPS_ABI, &other));
    REFUSED(pyps_unlink(NULL, 0));
    REFUSED(pyps_probe("misuse", NULL));
    REFUSED(pyps_restore("other", PYPS_ABI, &config, NULL, &other));
    REFUSED(pyps_push(s, NULL, &result));
    REFUSED(pyps_push(s, &args, NULL));
    REFUSED(pyps_exchange(s, &args, flat, NULL, &version));
    REFUSED(pyps_exchange(s, NULL, flat, &result, &version));
    REFUSED(pyps_encode(NULL, flat, FLAT, flat, 1, NULL));
    REFUSED(pyps_decode(PYPS_F32, NULL, 4 * FLAT, flat, FLAT));
    REFUSED(pyps_decode(PYPS_F32, flat, 4 * FLAT, NULL, FLAT));
    REFUSED(pyps_get_policy_needs(PYPS_ASP, NULL, NULL));
    REFUSED(pyps_core_create(NULL, NULL));
    REFUSED(pyps_core_step(NULL, NULL, NULL));
    REFUSED(pyps_core_ranks(NULL, NULL, 0));
    REFUSED(pyps_replay(NULL, NULL));
    must(pyps_close(NULL), "close of NULL"), must(pyps_close(s), "close");
}

/* A store without trained tensors has no codes: what is too short for its values is refused too. */
static void averaged_alone(void) {
    pyps_tensor values = {.name = "w", .ndim = 1, .shape = {PARAMETERS}, .kind = PYPS_AVERAGED};
    pyps_config config = small_config(&values, batches, 1, PYPS_ASP);
    pyps_store *s;
    float room[2 * FLAT];
    uint64_t version;
    must(pyps_create("misuse", PYPS_ABI, &config, &s), "create"),
        must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    REFUSED(pyps_pull_encoded(s, PYPS_INT8, room + FLAT, 4, &version));
    must(pyps_pull_encoded(s, PYPS_INT8, room, 4 * FLAT, &version), "pull");
    must(pyps_close(s), "close");
}

static void double_close(void) {
    pyps_store *s = created(), *other;
    pyps_status status;
    for (int i = 0; i < 100; i++) { /* so that an address would be used again */
        must(pyps_close(s), "close");
        REFUSED(pyps_close(s));
        must(pyps_open("misuse", PYPS_ABI, &other), "open");
        REFUSED(pyps_close(s));
        must(pyps_get_status(other, &status), "status of the other");
        s = other;
    }
    must(pyps_close(s), "close");
}

/* A program of an earlier header, whose open has two arguments and whose structs are smaller. */
static void other_abi(void) {
    pyps_store *s = created(), *out = (pyps_store *)&out;
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    const uint32_t theirs[] = {PYPS_ABI - 1, PYPS_ABI + 1, (uint32_t)(uintptr_t)&out};
    for (int i = 0; i < 3; i++) {
        expect(pyps_open("misuse", theirs[i], &out), PYPS_EABI, "open");
        expect(pyps_create("other", theirs[i], &config, &out), PYPS_EABI, "create");
        expect(pyps_open("misuse", theirs[i], NULL), PYPS_EABI, "open with what lay in a register");
    }
    CHECK(out == (pyps_store *)&out, "a caller of another ABI was written over");
    must(pyps_close(s), "close");
}

/* What a journal would be appended to, and which is none. */
static void other_files(void) {
    char folder[] = "/tmp/pyps-misuse-XXXXXX", path[64];
    pyps_store *s = created();
    pyps_replay_result result;
    CHECK(mkdtemp(folder) && !chdir(folder), "no folder");
    int fd = open("mine", O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && write(fd, "12345678", 8) == 8, "no file");
    CHECK(!mkfifo("pipe", 0600) && !symlink("new", "link") && !symlink("mine", "old"), "no special files");
    static const char *const names[] = {"mine", "pipe", "link", "old", "/dev/null"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        expect(pyps_journal(s, names[i]), PYPS_ECORRUPT, names[i]);
        CHECK(s->journal < 0, "%s is open", names[i]);
    }
    expect(pyps_replay("pipe", &result), PYPS_ECORRUPT, "replay of a pipe");
    CHECK(lseek(fd, 0, SEEK_END) == 8 && access("new", F_OK), "another file was written to");
    must(pyps_journal(s, "new"), "journal"), must(pyps_journal(s, "new"), "the same again");
    must(pyps_replay("new", &result), "replay"), must(pyps_close(s), "close");
    for (size_t i = 0; i < 4; i++) CHECK(!unlink(names[i]), "not removed");
    snprintf(path, sizeof path, "%s/new", folder);
    CHECK(!close(fd) && !unlink(path) && !rmdir(folder), "not removed");
}

/* A constant that is not a number would make every parameter one. */
static void constants(void) {
    pyps_store *s = created();
    pyps_claim claim;
    pyps_push_result result;
    uint32_t staging;
    must(pyps_start(s, 1, &claim), "start"), must(pyps_stage(s, 1, &staging), "stage");
    pyps_hyper hyper = {.lr = NAN};
    pyps_push_args args = {
        .size = sizeof args, .staging = staging, .samples = 4, .scale = 1, .hyper = &hyper};
    REFUSED(pyps_push(s, &args, &result));
    hyper = (pyps_hyper){.lr = 1, .weight_decay = INFINITY};
    REFUSED(pyps_push(s, &args, &result));
    hyper.weight_decay = 0;
    must(pyps_push(s, &args, &result), "the same push with numbers");
    must(pyps_close(s), "close");
}

/* The file ends before what a handle has mapped. */
static void truncated(void) {
    pyps_store *s = created();
    pyps_claim claim;
    CHECK(!ftruncate(s->fd, (off_t)s->layout.words), "not truncated");
    expect(pyps_start(s, 1, &claim), PYPS_ECORRUPT, "start");
    expect(pyps_close(s), PYPS_ECORRUPT, "close");
}

/* Created where the clock runs with an offset. */
static void other_clock(void) {
    pyps_store *s = created(), *other;
    s->header->clock_offset += 1000;
    expect(pyps_open("misuse", PYPS_ABI, &other), PYPS_EABI, "open");
    must(pyps_close(s), "close");
}

/* What was checked when the segment was opened is not read from it again. */
static void changed_tensor(void) {
    pyps_store *s = created();
    pyps_tensor found;
    pyps_tensor *shared = (pyps_tensor *)(void *)(s->base + s->layout.tensors);
    shared->ndim = 1000, shared->offset = UINT64_C(1) << 50;
    must(pyps_get_tensor(s, 0, &found), "tensor");
    CHECK(found.ndim == 1 && !found.offset, "found %u dimensions", found.ndim);
    must(pyps_close(s), "close");
}

/* The args of a caller whose pyps.h was older, or is newer. */
static int push_of_size(pyps_store *s, uint32_t size, char beyond) {
    struct {
        pyps_push_args args;
        char newer[16];
    } caller = {.args = {.size = size, .scale = 1, .hyper = &(pyps_hyper){.lr = 1}}};
    pyps_claim claim;
    pyps_push_result result;
    uint32_t staging;
    memset(caller.newer, beyond, sizeof caller.newer);
    must(pyps_start(s, 1, &claim), "start"), must(pyps_stage(s, 1, &staging), "stage");
    memset(pyps_staging(s, staging), 0, FLAT * sizeof(float));
    caller.args.staging = staging, caller.args.samples = claim.count;
    uint32_t known = size < sizeof size ? sizeof size : size;
    if (known < sizeof caller.args) memset((char *)&caller + known, 0x55, sizeof caller.args - known);
    int rc = pyps_push(s, &caller.args, &result);
    if (rc) must(pyps_unstage(s, staging), "unstage");
    return rc;
}

/* A caller that forgot the size, of every struct that has one and is not refused for another reason. */
static void other_sizes(pyps_store *s) {
    static const uint32_t batches[] = {4};
    pyps_store *made;
    pyps_core *core;
    pyps_decision decision;
    pyps_policy_needs needs;
    pyps_encode_result encoded;
    pyps_push_result result;
    float value = 1, code;
    pyps_ticket as = {.scale = 1};
    pyps_push_args push = {.size = sizeof push, .hyper = &(pyps_hyper){.lr = 1}, .decided = &as};
    pyps_config config = {.size = sizeof config, .ranks = 1, .batches = batches};
    REFUSED(pyps_create("other", PYPS_ABI, &(pyps_config){.ranks = 1}, &made));
    REFUSED(pyps_restore("other", PYPS_ABI, &config, &(pyps_state){.ranks = 1}, &made));
    REFUSED(pyps_push(s, &push, &result));
    REFUSED(pyps_set_data_set(s, &(pyps_data_set){.length = 1}));
    REFUSED(pyps_set_cost_model(s, &(pyps_cost_model){.max_batch = 1}));
    REFUSED(pyps_set_custom(&(pyps_custom){.start = NULL}));
    REFUSED(pyps_get_policy_needs(PYPS_ASP, &(pyps_policy_params){.bound = 1}, &needs));
    REFUSED(pyps_encode(&(pyps_encode_args){.scale = 1}, &value, 1, &code, sizeof code, &encoded));
    must(pyps_core_create(&config, &core), "core");
    REFUSED(pyps_core_step(core, &(pyps_event){.kind = PYPS_ON_TICK}, &decision));
    pyps_core_free(core);
}

static void sizes(void) {
    pyps_store *s = created();
    uint32_t size = sizeof(pyps_push_args), least = offsetof(pyps_push_args, gradient);
    must(push_of_size(s, least, 0), "a push of an older caller");
    must(push_of_size(s, offsetof(pyps_push_args, ranges), 0), "a push of a caller without ranges");
    must(push_of_size(s, size + 16, 0), "a push of a newer caller");
    REFUSED(push_of_size(s, size + 16, 1));
    REFUSED(push_of_size(s, least - 1, 0));
    REFUSED(push_of_size(s, 0, 0));
    REFUSED(push_of_size(s, UINT32_MAX, 0));
    other_sizes(s);
    must(pyps_close(s), "close");
}

static const struct {
    const char *name;
    void (*body)(void);
} tests[] = {
    {"null-arguments", null_arguments}, {"double-close", double_close}, {"other-abi", other_abi},
    {"other-files", other_files},       {"constants", constants},       {"sizes", sizes},
    {"truncated", truncated},           {"other-clock", other_clock},   {"changed-tensor", changed_tensor},
    {"averaged-alone", averaged_alone},
};

int main(int argc, char **argv) {
    char path[4096];
    for (size_t i = 0; argc == 2 && i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(tests[i].name, argv[1])) {
            alarm(60);
            tests[i].body();
            snprintf(path, sizeof path, "%s/pyps-misuse", getenv("PYPS_SHM_DIR"));
            CHECK(!unlink(path), "no segment");
            return 0;
        }
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) puts(tests[i].name);
    return argc == 1 ? 0 : 2;
}
