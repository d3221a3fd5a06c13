/* deaths.c: participants that are killed or stopped while they help, in twos; the others must go on.
 *
 * Usage: deaths NAME. A child dies, or stops, at a failpoint of its own choice; the main process acts for the
 * others. Every store has one chunk, and a push of 1 adds -1 to all parameters.
 */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

static const char *fatal; /* the failpoint at which this process raises `fault` */
static int fault = SIGKILL;

/* A thread of the main process that stops at a failpoint until it is let go. */
static _Thread_local struct pusher *self;
struct pusher {
    pthread_t thread;
    sem_t arrived, go;
    const char *point;
    pyps_store *store;
    int rc;
};

void pyps_failpoint(const char *name) {
    if (fatal && !strcmp(name, fatal)) fatal = NULL, raise(fault);
    if (!self || !self->point || strcmp(name, self->point)) return;
    self->point = NULL;
    sem_post(&self->arrived), sem_wait(&self->go);
}

static pyps_store *created(uint32_t staging_buffers) {
    pyps_store *s = store_of_one_chunk("deaths", 1, PYPS_ASP, 60, staging_buffers);
    must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
    return s;
}

static void *push_in_thread(void *argument) {
    pyps_push_result result;
    self = argument;
    self->rc = push_value(self->store, 1, PYPS_F32, &result);
    return NULL;
}

/* Returns when the push is admitted and nothing of it is applied. */
static void admit(struct pusher *p, pyps_store *s) {
    *p = (struct pusher){.store = s, .point = "push.admitted"};
    sem_init(&p->arrived, 0, 0), sem_init(&p->go, 0, 0);
    CHECK(!pthread_create(&p->thread, NULL, push_in_thread, p), "no thread");
    sem_wait(&p->arrived);
}

static void finish(struct pusher *p, const char *what) {
    sem_post(&p->go);
    pthread_join(p->thread, NULL);
    must(p->rc, what);
}

static int join_observer(pyps_store *s) { return pyps_join(s, PYPS_OBSERVER, -1, NULL); }
static int join_and_help(pyps_store *s) {
    float flat[FLAT];
    uint64_t version;
    int rc = join_observer(s);
    return rc ? rc : pyps_snapshot(s, flat, NULL, NULL, 10, &version);
}
static int reap(pyps_store *s) { return pyps_reap(s, NULL); }

/* A child that acts on the store until `fault` at the failpoint; returns when it is dead, or stopped. */
static pid_t child(int (*body)(pyps_store *s), const char *point) {
    int status;
    pid_t pid = fork();
    CHECK(pid >= 0, "no child");
    if (!pid) {
        pyps_store *s;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        must(pyps_open("deaths", PYPS_ABI, &s), "open");
        fatal = point;
        must(body(s), "the child's part");
        _exit(0);
    }
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && !WIFEXITED(status), "the child passed %s", point);
    return pid;
}

static void end(pid_t pid) { kill(pid, SIGKILL), waitpid(pid, NULL, 0); }

static void check_parameter(pyps_store *s, float value) {
    float flat[FLAT];
    uint64_t version;
    must(pyps_pull(s, flat, &version), "pull");
    CHECK(flat[0] == value, "parameter: found %g; expected %g", (double)flat[0], (double)value);
}

/* Two participants fall, one after the other, each with a buffer in private and another one pinned that is
 * displaced afterwards; then all the others still push, reap and join. */
static void two_fall(int (*body)(pyps_store *s), int signal) {
    pyps_store *s = created(3), *late; /* a stopped helper keeps one staging buffer */
    struct pusher p;
    pyps_push_result result;
    pid_t fallen[2];
    fault = signal;
    for (int i = 0; i < 2; i++) {
        admit(&p, s);
        fallen[i] = child(body, "apply.computed");
        finish(&p, "push");
    }
    for (int i = 0; i < 4; i++) must(push_value(s, 1, PYPS_F32, &result), "push after two have fallen");
    check_parameter(s, -6);
    must(pyps_open("deaths", PYPS_ABI, &late), "open"),
        must(join_observer(late), "join after two have fallen");
    must(pyps_close(late), "close");
    for (int i = 0; i < 2 && signal == SIGSTOP; i++) end(fallen[i]);
    must(pyps_reap(s, NULL), "reap");
    check_parameter(s, -6);
    must(pyps_close(s), "close");
}

static void killed_joiners(void) { two_fall(join_observer, SIGKILL); }
static void stopped_joiners(void) { two_fall(join_observer, SIGSTOP); }
static void killed_helpers(void) { two_fall(join_and_help, SIGKILL); }

/* The same of processes that reap without having joined: there is a dead one for them to find. */
static int die_joined(pyps_store *s) {
    must(join_observer(s), "join");
    return raise(SIGKILL);
}

static void killed_reapers(void) {
    pyps_store *s = created(2);
    struct pusher p;
    pyps_push_result result;
    for (int i = 0; i < 2; i++) {
        fault = SIGKILL;
        child(die_joined, "none");
        admit(&p, s);
        child(reap, "apply.computed");
        finish(&p, "push");
    }
    for (int i = 0; i < 4; i++) must(push_value(s, 1, PYPS_F32, &result), "push after two reapers died");
    check_parameter(s, -6);
    must(pyps_close(s), "close");
}

/* A helper is killed while it reads the only staging buffer of a worker: the worker can fill it again. */
static void killed_reader(void) {
    pyps_store *s = created(1);
    struct pusher p;
    pyps_push_result result;
    admit(&p, s);
    child(join_observer, "apply.computed");
    finish(&p, "push");
    must(push_value_by(s, 1, PYPS_F32, 30, &result), "push from the buffer that the dead one read");
    check_parameter(s, -2);
    must(pyps_close(s), "close");
}

/* Each stopped helper keeps the staging buffer that it reads. A worker with another one goes on; one without waits,
 * and loses nothing: it goes on when a helper does, or is killed. */
static void stopped_readers(void) {
    pyps_store *s = created(2);
    struct pusher p;
    pyps_push_result result;
    pyps_claim claim;
    uint32_t staging;
    pid_t stopped[2];
    fault = SIGSTOP;
    for (int i = 0; i < 2; i++) {
        admit(&p, s);
        stopped[i] = child(join_observer, "apply.computed");
        finish(&p, "push beside a stopped helper");
    }
    must(pyps_start(s, 10, &claim), "start");
    expect(pyps_stage(s, 0.2, &staging), PYPS_ETIMEDOUT, "stage with both buffers read");
    check_parameter(s, -2);
    end(stopped[0]);
    must(pyps_stage(s, 30, &staging), "stage after one reader is gone");
    must(pyps_unstage(s, staging), "unstage");
    kill(stopped[1], SIGCONT), waitpid(stopped[1], NULL, 0);
    must(push_value_by(s, 1, PYPS_F32, 30, &result), "push after the other one went on");
    check_parameter(s, -3);
    must(pyps_close(s), "close");
}

static const struct test_case tests[] = {
    {"killed-joiners", killed_joiners}, {"stopped-joiners", stopped_joiners},
    {"killed-helpers", killed_helpers}, {"killed-reapers", killed_reapers},
    {"killed-reader", killed_reader},   {"stopped-readers", stopped_readers},
};

int main(int argc, char **argv) {
    return run_case(tests, sizeof tests / sizeof *tests, "deaths", argc, argv);
}
