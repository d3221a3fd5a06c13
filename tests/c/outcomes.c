/* outcomes.c: what became of a push that failed, row by row of the table in pyps.h: was the gradient staged, whose is
 * its buffer, may one call again.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>

#include "common.h"

#define TURNS policy_numbered("r2sp")

void pyps_failpoint(const char *name) { (void)name; }

static pyps_store *first, *second; /* two workers of a store */

static void open_two(uint32_t policy, double round_timeout) {
    first = store_of_one_chunk("outcomes", 2, policy, round_timeout, 2);
    must(pyps_join(first, PYPS_WORKER, 0, NULL), "join");
    second = another_worker("outcomes");
}

static void close_two(void) { must(pyps_close(first), "close"), must(pyps_close(second), "close"); }

static pyps_claim start(pyps_store *s) {
    pyps_claim claim;
    must(pyps_start(s, 10, &claim), "start");
    return claim;
}

/* A staging buffer that is all `value`. */
static uint32_t stage(pyps_store *s, float value) {
    uint32_t staging;
    must(pyps_stage(s, 10, &staging), "stage");
    for (uint64_t i = 0; i < FLAT; i++) pyps_staging(s, staging)[i] = value;
    return staging;
}

static int push(pyps_store *s, uint32_t staging, uint32_t samples, double seconds, pyps_push_result *out) {
    pyps_push_args args = {.size = sizeof args, .staging = staging, .samples = samples, .scale = 1};
    args.hyper = &push_hyper, args.timeout_seconds = seconds;
    return pyps_push(s, &args, out);
}

static void check_version(pyps_store *s, uint64_t version, float parameter) {
    float flat[FLAT];
    uint64_t found;
    must(pyps_pull(s, flat, &found), "pull");
    CHECK(found == version && fabsf(flat[0] - parameter) < 1e-6f,
          "found %g at version %llu; expected %g at %llu", (double)flat[0], (unsigned long long)found,
          (double)parameter, (unsigned long long)version);
}

/* The caller's buffer may be given back; the store's may not. */
static bool is_callers(pyps_store *s, uint32_t staging) {
    return s->own_staging[staging].taken && !pyps_unstage(s, staging);
}

static void invalid(void) {
    open_two(PYPS_ASP, 60);
    uint32_t samples = start(first).count, staging = stage(first, 1);
    pyps_push_result out;
    start(second);
    expect(push(first, staging, samples + 1, 1, &out), PYPS_EINVAL, "too many samples");
    must(push(first, staging, samples, 1, &out), "the same with the claim's");
    check_version(first, 1, -1);
    close_two();
}

static void not_finite(void) {
    open_two(PYPS_ASP, 60);
    uint32_t samples = start(first).count, staging = stage(first, 1);
    pyps_push_result out;
    start(second);
    pyps_staging(first, staging)[7] = NAN;
    expect(push(first, staging, samples, 1, &out), PYPS_ENONFINITE, "NaN");
    CHECK(pyps_staging(first, staging)[3] == 1, "the gradient is gone");
    pyps_staging(first, staging)[7] = 1;
    must(push(first, staging, samples, 1, &out), "the same without");
    check_version(first, 1, -1);
    start(first), staging = stage(first, INFINITY);
    expect(push(first, staging, samples, 1, &out), PYPS_ENONFINITE, "infinity");
    must(push(first, staging, 0, 1, &out), "the step skipped");
    check_version(first, 1, -1);
    close_two();
}

static void false_look(void) {
    open_two(PYPS_ASP, 60);
    const pyps_range all = {0, FLAT}, most = {0, 7};
    uint32_t samples = start(first).count, staging = stage(first, 1);
    pyps_push_args args = {.size = sizeof args, .staging = staging, .samples = samples, .scale = 1};
    args.hyper = &push_hyper, args.timeout_seconds = 1, args.looked = &most, args.looked_count = 1;
    pyps_push_result out;
    start(second);
    pyps_staging(first, staging)[7] = NAN;
    expect(pyps_finite(pyps_staging(first, staging), FLAT), PYPS_ENONFINITE, "a look");
    expect(pyps_push(first, &args, &out), PYPS_ENONFINITE, "what was not looked at");
    args.looked = &all;
    expect(pyps_push(first, &args, &out), PYPS_EFALSELOOK, "a false look");
    CHECK(out.version == 1 && out.admitted_nanoseconds && !is_callers(first, staging),
          "it is not admitted, or its buffer is still the caller's");
    check_version(second, 1, 0);
    start(first), args.staging = stage(first, 1);
    must(pyps_push(first, &args, &out), "the next one");
    check_version(second, 2, -1);
    close_two();
}

static void rejected(void) {
    open_two(policy_numbered("backup"), 60);
    uint32_t samples = start(first).count, staging = stage(first, 1), late = stage(second, 5);
    pyps_push_result out;
    start(second);
    must(push(first, staging, samples, 10, &out), "the first of the round");
    expect(push(second, late, samples, 10, &out), PYPS_EREJECTED, "the one that it closed without");
    CHECK(!out.admitted_nanoseconds && !is_callers(second, late), "the refused buffer is still the caller's");
    check_version(first, 1, -1);
    close_two();
}

static void fenced(void) {
    open_two(PYPS_BSP, 0.1);
    uint32_t samples = start(first).count, staging = stage(first, 1), late = stage(second, 5);
    pyps_push_result out;
    start(second);
    must(push(first, staging, samples, 10, &out), "the round without the one that is fenced");
    expect(push(second, late, samples, 10, &out), PYPS_EFENCED, "the fenced one's push");
    CHECK(!out.admitted_nanoseconds && second->own_staging[late].taken,
          "the buffer was taken back before the rejoin");
    must(pyps_rejoin(second), "rejoin");
    CHECK(!is_callers(second, late), "the buffer is still the caller's");
    check_version(first, 1, -1);
    close_two();
}

/* A worker that waits for its turn has staged nothing. */
static void timed_out_before(void) {
    open_two(TURNS, 60);
    pyps_push_result out;
    uint32_t samples = start(second).count, staging = stage(second, 1);
    start(first);
    expect(push(second, staging, samples, 0.05, &out), PYPS_ETIMEDOUT, "a push before its turn");
    CHECK(!out.admitted_nanoseconds, "found the gradient staged");
    must(push(first, stage(first, 0), samples, 1, &out), "the turn before");
    check_version(first, 1, 0);
    must(push(second, staging, samples, 10, &out), "the same push");
    CHECK(out.admitted_nanoseconds, "found it not staged");
    check_version(second, 2, -1);
    close_two();
}

/* In a round it is staged: the same call waits on, and stages nothing twice. */
static void timed_out_staged(void) {
    open_two(PYPS_BSP, 60);
    uint32_t samples = start(first).count, staging = stage(first, 1);
    pyps_push_result out;
    start(second);
    expect(push(first, staging, samples, 0.05, &out), PYPS_ETIMEDOUT, "a round without the other");
    CHECK(out.admitted_nanoseconds, "found it not staged");
    expect(pyps_unstage(first, staging), PYPS_EINVAL, "unstage");
    expect(push(first, staging, samples, 0.05, &out), PYPS_ETIMEDOUT, "the same once more");
    CHECK(out.admitted_nanoseconds, "found it not staged at the second call");
    expect(push(second, stage(second, 3), samples, 0, &out), PYPS_OK, "the other's");
    must(push(first, staging, samples, 1, &out), "the same at last");
    CHECK(out.sources == 2 && out.admitted_nanoseconds, "found %u sources", out.sources);
    check_version(first, 1, -2);
    close_two();
}

/* Or leave: the gradient counts. */
static void left_staged(void) {
    open_two(PYPS_BSP, 60);
    uint32_t samples = start(first).count;
    pyps_push_result out;
    start(second);
    expect(push(first, stage(first, 1), samples, 0.05, &out), PYPS_ETIMEDOUT, "a round without the other");
    must(pyps_leave(first), "leave");
    must(push(second, stage(second, 3), samples, 10, &out), "the other's");
    check_version(second, 1, -2);
    close_two();
}

static int now(void) { return 1; }

static void interrupted(void) {
    open_two(PYPS_BSP, 60);
    uint32_t samples = start(first).count, staging = stage(first, 1);
    pyps_push_result out;
    start(second);
    pyps_set_interrupt(now);
    expect(push(first, staging, samples, 10, &out), PYPS_EINTR, "an interrupted push");
    pyps_set_interrupt(NULL);
    CHECK(out.admitted_nanoseconds, "found it not staged");
    expect(push(second, stage(second, 3), samples, 10, &out), PYPS_OK, "the other's");
    must(push(first, staging, samples, 1, &out), "the same");
    check_version(first, 1, -2);
    close_two();
}

static bool disk_full;

/* In place of the C library's: the file system is full when a case says so. */
int posix_fallocate(int fd, off_t offset, off_t bytes) {
    return disk_full ? ENOSPC : fallocate(fd, 0, offset, bytes) ? errno : 0;
}

static void no_space(void) {
    open_two(PYPS_ASP, 60);
    uint32_t samples = start(first).count, staging = stage(first, 1);
    pyps_push_result out;
    start(second);
    pyps_push_args args = {.size = sizeof args, .staging = staging, .samples = samples, .scale = 1};
    args.hyper = &push_hyper, args.codec = PYPS_INT8, disk_full = true;
    expect(pyps_push(first, &args, &out), PYPS_ENOSPC, "no memory for codes");
    CHECK(!out.admitted_nanoseconds && pyps_staging(first, staging)[3] == 1, "the gradient is gone");
    disk_full = false;
    must(pyps_push(first, &args, &out), "the same with room");
    check_version(first, 1, -1);
    close_two();
}

/* As if stopped participants held every buffer that is free, or as if they had gone on. */
static void hold_buffers(bool held) {
    uint64_t from = held ? HOLDER_NONE : 8, to = held ? 8 : HOLDER_NONE; /* slot 7 + 1 */
    for (uint32_t b = 0; b < first->layout.buffer_count; b++) {
        uint64_t owner = load_acquire(&first->owners[b]);
        bool named = b == word_buffer(load_acquire(&first->words[0]));
        if (!named && owner_holder(owner) == from)
            store_seq(&first->owners[b], owner_make(owner_generation(owner), to, owner_chunk(owner)));
    }
}

/* The buffers of views that have memory are all in use, and no other gets any: nothing has happened. */
static void no_space_for_a_view(void) {
    open_two(PYPS_ASP, 60);
    uint32_t samples = start(first).count, staging = stage(first, 1);
    pyps_push_result out;
    a64 *owners = first->view_owners;
    CHECK(first->layout.views_allocated == 2, "found %u views with memory", first->layout.views_allocated);
    for (uint32_t b = 0; b < 2; b++)
        if (b != word_buffer(load_seq(&first->header->view))) store_seq(&owners[b], owner_make(1, 8, 0));
    disk_full = true;
    expect(push(first, staging, samples, 10, &out), PYPS_ENOSPC, "no memory for a view");
    CHECK(!out.admitted_nanoseconds && pyps_staging(first, staging)[3] == 1, "the gradient is gone");
    disk_full = false;
    must(push(first, staging, samples, 10, &out), "the same with room");
    check_version(first, 1, -1);
    close_two();
}

/* A push that is admitted at once is complete for its worker: the others complete it when they find a buffer. */
static void full(void) {
    open_two(PYPS_ASP, 60);
    pyps_push_result out;
    uint32_t samples = start(first).count, staging = stage(first, 1);
    start(second), hold_buffers(true);
    must(push(first, staging, samples, 10, &out), "a push without a free buffer");
    CHECK(out.admitted_nanoseconds && out.version == 1 && !is_callers(first, staging), "found it not staged");
    hold_buffers(false);
    must(push(second, stage(second, 2), samples, 10, &out), "the other's");
    check_version(second, 2, -3);
    close_two();
}

/* In a round the same call goes on, and stages nothing twice. */
static void full_round(void) {
    open_two(PYPS_BSP, 60);
    pyps_push_result out;
    uint32_t samples = start(first).count, early = stage(first, 1), late = stage(second, 3);
    start(second);
    expect(push(first, early, samples, 0.05, &out), PYPS_ETIMEDOUT, "a round without the other");
    hold_buffers(true);
    expect(push(second, late, samples, 10, &out), PYPS_EFULL, "a round without a free buffer");
    CHECK(out.admitted_nanoseconds, "found it not staged");
    expect(pyps_unstage(second, late), PYPS_EINVAL, "unstage");
    hold_buffers(false);
    must(push(second, late, samples, 10, &out), "the same");
    CHECK(out.version == 1 && out.sources == 2, "found %u sources", out.sources);
    must(push(first, early, samples, 10, &out), "the other's");
    check_version(first, 1, -2);
    close_two();
}

/* Where no call waits for a round: its last push is complete for its worker, and the next is not staged before it is. */
static void full_before(void) {
    open_two(PYPS_SOFTSYNC, 60);
    pyps_push_result out;
    uint32_t samples = start(first).count, early = stage(first, 1), next = stage(first, 5);
    uint32_t late = stage(second, 3);
    start(second);
    must(push(first, early, samples, 10, &out), "the first of a round");
    hold_buffers(true);
    must(push(second, late, samples, 10, &out), "the last, without a free buffer");
    CHECK(out.version == 1 && out.sources == 2 && !is_callers(second, late), "found %u sources", out.sources);
    hold_buffers(false), start(first), hold_buffers(true);
    expect(push(first, next, samples, 10, &out), PYPS_EFULL, "the next");
    CHECK(!out.admitted_nanoseconds && pyps_staging(first, next)[3] == 5, "the gradient is gone");
    hold_buffers(false);
    must(push(first, next, samples, 10, &out), "the same");
    CHECK(out.admitted_nanoseconds && !out.version, "found it in no round");
    check_version(first, 1, -2);
    close_two();
}

/* A damaged segment: no call does harm, and the handle can be closed. */
static void damaged(void) {
    open_two(PYPS_ASP, 60);
    pyps_push_result out;
    uint32_t samples = start(first).count, staging = stage(first, 1), other = stage(second, 1);
    start(second);
    store_seq(&first->words[0], word_make(0, first->layout.buffer_count));
    expect(push(first, staging, samples, 10, &out), PYPS_ECORRUPT, "a chunk in an impossible buffer");
    expect(push(second, other, samples, 10, &out), PYPS_ECORRUPT, "the other's");
    expect(pyps_stage(first, 10, &staging), PYPS_ECORRUPT, "stage");
    close_two();
}

/* This process has closed the descriptor: the others find it gone, with its lock. */
static void no_descriptor(void) {
    open_two(PYPS_ASP, 60);
    pyps_push_result out;
    uint32_t samples = start(first).count, staging = stage(first, 1), dead;
    start(second);
    must(close(first->fd), "close");
    expect(push(first, staging, samples, 10, &out), PYPS_ESYS, "a push without a descriptor");
    expect(push(first, staging, samples, 10, &out), PYPS_ESYS, "the same once more");
    expect(pyps_close(first), PYPS_ESYS, "close");
    must(pyps_reap(second, &dead), "reap");
    CHECK(dead == 1, "found %u dead", dead);
    must(push(second, stage(second, 2), samples, 10, &out), "the other's");
    check_version(second, 1, -2);
    must(pyps_close(second), "close");
}

static const struct test_case cases[] = {
    {"invalid", invalid},
    {"not-finite", not_finite},
    {"false-look", false_look},
    {"rejected", rejected},
    {"fenced", fenced},
    {"before-turn", timed_out_before},
    {"staged", timed_out_staged},
    {"left-staged", left_staged},
    {"interrupted", interrupted},
    {"no-space", no_space},
    {"no-space-for-a-view", no_space_for_a_view},
    {"full", full},
    {"full-round", full_round},
    {"full-before", full_before},
    {"damaged", damaged},
    {"no-descriptor", no_descriptor},
};

int main(int argc, char **argv) {
    return run_case(cases, sizeof cases / sizeof *cases, "outcomes", argc, argv);
}
