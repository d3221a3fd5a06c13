/* forks.c: children that are forked while another thread joins, leaves, pushes, and begins and ends a crew. Each closes
 * the handle that it got, whatever that thread was doing with it. It asks for no memory: the lock of a sanitizer's
 * allocator may have been that thread's.
 *
 * Usage: forks COUNT.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

#define CHUNKS 20

static _Atomic(pyps_store *) shared;
static atomic_bool ends;
static unsigned long turns;

void pyps_failpoint(const char *name) { (void)name; }

static void *come_and_go(void *argument) {
    (void)argument;
    for (; !ends; turns++) {
        pyps_store *s;
        pyps_push_result result;
        must(pyps_open("forks", PYPS_ABI, &s), "open");
        shared = s;
        must(pyps_join(s, PYPS_WORKER, -1, NULL), "join"), must(pyps_set_threads(s, 4, NULL), "threads");
        must(push_value(s, 1, PYPS_F32, &result), "push");
        must(pyps_set_threads(s, 1 + turns % 3, NULL), "fewer threads");
        must(pyps_leave(s), "leave"), must(pyps_join(s, PYPS_WORKER, -1, NULL), "join");
        must(pyps_close(s), "close");
    }
    return NULL;
}

static void child(void) {
    pyps_store *theirs = shared;
    int rc = theirs ? pyps_close(theirs) : PYPS_OK;
    CHECK(!rc || rc == PYPS_EINVAL, "close of the parent's handle: %s", pyps_error_message());
    if (theirs) expect(pyps_close(theirs), PYPS_EINVAL, "second close");
    _exit(0);
}

int main(int argc, char **argv) {
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {CHUNKS * FLAT}};
    static const uint32_t batches[] = {4};
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    long count = argc == 2 ? atol(argv[1]) : 0;
    pyps_store *s;
    pthread_t thread;
    config.max_participants = 16;
    alarm(60 + (unsigned)count / 20);
    must(pyps_create("forks", PYPS_ABI, &config, &s), "create"), must(pyps_close(s), "close");
    CHECK(!pthread_create(&thread, NULL, come_and_go, NULL), "no thread");
    for (long i = 0; i < count; i++) {
        int status;
        pid_t pid = fork();
        if (!pid) child();
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status),
              "child %ld of %lu turns ended with status %d", i, turns, status);
    }
    ends = true;
    CHECK(!pthread_join(thread, NULL), "no thread");
    must(pyps_unlink("forks", 0), "unlink"); /* no child has kept it open */
    printf("%ld forks, %lu turns of the other thread\n", count, turns);
    return 0;
}
