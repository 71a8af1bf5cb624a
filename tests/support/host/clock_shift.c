/* Preloaded into a process, this lets its clock be wrong by as many seconds as a file says.
 *
 * CLOCK_FILE, defined when this is compiled, names a file of eight bytes, a signed number of
 * seconds; the clock jumps as soon as it is written, in all processes that were started with it.
 * Clocks that count from the boot are right, as they are when a machine's time is set.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *shift;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void find_clock(void) {
    static const int64_t none = 0;
    int descriptor = open(CLOCK_FILE, O_RDONLY | O_CLOEXEC);
    void *mapped = MAP_FAILED;
    if (descriptor >= 0) {
        mapped = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, descriptor, 0);
        close(descriptor);
    }
    shift = mapped == MAP_FAILED ? &none : mapped;
    *(void **)&real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t which, struct timespec *moment) {
    if (!real_clock_gettime) find_clock();
    int failed = real_clock_gettime(which, moment);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        moment->tv_sec += *shift;
    return failed;
}

int gettimeofday(struct timeval *restrict moment, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    moment->tv_sec = now.tv_sec;
    moment->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
