/* waits.c: waiting: deadlines, stops of the process, interrupts, and waiters that die.
 *
 * Usage: waits NAME. Each case makes its own store, of one chunk.
 */
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

static const char *armed; /* the failpoint at which `meddle` is called, once */
static void (*meddle)(void);

void pyps_failpoint(const char *name) {
    if (!armed || strcmp(name, armed)) return;
    armed = NULL;
    meddle();
}

static pyps_store *created(uint32_t ranks, uint32_t policy, double round_timeout) {
    return store_of_one_chunk("waits", ranks, policy, round_timeout, 0);
}

static pyps_store *joined(void) { return another_worker("waits"); }

/* Whether waiting until that time slept at all. */
static bool sleeps_until(pyps_store *s, uint64_t at) {
    struct rusage before, after;
    uint64_t now = wait_now_nanoseconds();
    getrusage(RUSAGE_THREAD, &before);
    struct waiting waiting = {PYPS_WAITS_TURN, now, UINT64_MAX};
    must(view_wait_for_others(s, &waiting, view_sequence_word(s), at), "wait");
    getrusage(RUSAGE_THREAD, &after);
    return after.ru_nvcsw != before.ru_nvcsw;
}

/* A time that came during the decision to wait for it is not slept through. */
static void passed_time(void) {
    pyps_store *s = created(1, PYPS_ASP, 60);
    unsigned slept = 0;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    for (int i = 0; i < 5; i++)
        slept += sleeps_until(s, wait_now_nanoseconds()); /* it may sleep for another reason */
    CHECK(slept < 5, "slept each time");
    must(pyps_close(s), "close");
}

/* Timeouts that are infinite or not numbers. */
static void odd_timeouts(void) {
    pyps_store *s = created(2, PYPS_ASP, 60);
    pyps_claim claim;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    expect(pyps_start(s, NAN, &claim), PYPS_ETIMEDOUT, "start within NaN seconds");
    CHECK(wait_deadline_after(INFINITY) == UINT64_MAX, "an infinite deadline passes");
    must(pyps_close(s), "close");
}

static pyps_store *slow;

static void push_at_last(void) {
    pyps_push_result result;
    must(push_value(slow, 1, PYPS_F32, &result), "the push of a worker that was stopped with all others");
}

static void stop(void) {
    usleep(1200000);
    armed = "wait.slept", meddle = push_at_last;
}

/* A pause of the whole job, longer than the round timeout: the first to wake fences no other for it. */
static void paused_job(void) {
    pyps_store *s = created(2, PYPS_BSP, 1);
    pyps_push_result result;
    pyps_claim claim;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join"), slow = joined();
    must(pyps_start(slow, 1, &claim), "start");
    armed = "wait.slept", meddle = stop;
    must(push_value(s, 1, PYPS_F32, &result), "push");
    CHECK(result.sources == 2 && !armed, "found %u sources", result.sources);
    must(pyps_close(slow), "close"), must(pyps_close(s), "close");
}

static void wait_to_start(void) {
    pyps_claim claim;
    must(pyps_start(joined(), 60, &claim), "start");
    exit(0);
}

/* A waiter that is killed leaves no trace in the cost of later events. */
static void killed_waiter(void) {
    pyps_store *s = created(2, PYPS_ASP, 60);
    pid_t pid = fork();
    if (!pid) wait_to_start();
    for (int i = 0; i < 3000 && !load32_seq(&s->header->view_waiters); i++) usleep(10000);
    kill(pid, SIGKILL), waitpid(pid, NULL, 0);
    CHECK(load32_seq(&s->header->view_waiters), "it did not wait");
    must(pyps_reap(s, NULL), "reap");
    CHECK(!load32_seq(&s->header->view_waiters), "the dead one still counts as a waiter");
    must(pyps_close(s), "close");
}

static int interrupt(void) { return 1; }

/* A wait ends when the process says so. */
static void interrupted_wait(void) {
    pyps_store *s = created(2, PYPS_ASP, 60);
    pyps_claim claim;
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    must(pyps_set_interrupt(interrupt), "set");
    expect(pyps_start(s, 50, &claim), PYPS_EINTR, "start");
    expect(pyps_wait(s, 1000, 50), PYPS_EINTR, "wait");
    must(pyps_close(s), "close");
}

static const struct test_case tests[] = {
    {"passed-time", passed_time},     {"odd-timeouts", odd_timeouts},         {"paused-job", paused_job},
    {"killed-waiter", killed_waiter}, {"interrupted-wait", interrupted_wait},
};

int main(int argc, char **argv) { return run_case(tests, sizeof tests / sizeof *tests, "waits", argc, argv); }
