/* clang++, ar and objcopy of zig, by the name that it is called by, from the execution root of an
   action.

   zig keeps run-time libraries that it builds itself in a cache, which two actions must not share:
   each call of clang++ has a folder of its own, filled from $STONEWARE_ZIG_CACHE (a finished one)
   for a link. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char zig[] = ZIG; /* its path from there */
static char target[] = "x86_64-linux-gnu.2.28"; /* a later -target replaces it */
static char scratch[PATH_MAX];
static size_t source_length;
static volatile sig_atomic_t child;
static const int kStopSignals[] = {SIGHUP, SIGINT, SIGTERM};

/* At 64 a walk over the cache never runs out of file descriptors. */
enum { kOpenFolders = 64 };

static void Fail(const char* what) {
  fprintf(stderr, "zig_tool: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int CopyOne(const char* path, const struct stat* info, int kind, struct FTW* place) {
  (void)place;
  char copy[2 * PATH_MAX];
  snprintf(copy, sizeof copy, "%s%s", scratch, path + source_length);
  if (kind == FTW_D) return mkdir(copy, 0755) != 0 && errno != EEXIST ? -1 : 0;
  const int from = open(path, O_RDONLY | O_CLOEXEC);
  const int to = open(copy, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (from < 0 || to < 0) return -1;
  for (off_t done = 0; done < info->st_size;) {
    if (sendfile(to, from, &done, info->st_size - done) <= 0) return -1;
  }
  close(from);
  return close(to);
}

static int DeleteOne(const char* path, const struct stat* info, int kind, struct FTW* place) {
  (void)info, (void)kind, (void)place;
  return remove(path);
}

static void DeleteScratch(void) { nftw(scratch, DeleteOne, kOpenFolders, FTW_DEPTH | FTW_PHYS); }

/* Bazel ends an action with SIGTERM: zig has to end before its folder goes. */
static void Stop(int number) { kill(child, number); }

/* What the three signals do, and whether they wait. */
static void SetStop(void (*handler)(int), int how) {
  sigset_t signals;
  sigemptyset(&signals);
  for (size_t i = 0; i < sizeof kStopSignals / sizeof *kStopSignals; ++i) {
    signal(kStopSignals[i], handler);
    sigaddset(&signals, kStopSignals[i]);
  }
  sigprocmask(how, &signals, NULL);
}

static void MakeScratch(void) {
  const char* parent = getenv("TMPDIR");
  snprintf(scratch, sizeof scratch, "%s/zig.XXXXXXXX", parent != NULL ? parent : "/tmp");
  if (mkdtemp(scratch) == NULL) Fail(scratch);
  atexit(DeleteScratch);
  const char* cache = getenv("STONEWARE_ZIG_CACHE");
  if (cache != NULL && *cache != '\0') {
    source_length = strlen(cache);
    /* A sandbox holds links to read-only files: they are followed. */
    if (nftw(cache, CopyOne, kOpenFolders, 0) != 0) Fail(cache);
  }
  setenv("ZIG_GLOBAL_CACHE_DIR", scratch, 1);
  setenv("ZIG_LOCAL_CACHE_DIR", scratch, 1);
}

/* Runs zig to its end; its exit status. */
static int Run(char** arguments) {
  child = fork();
  if (child < 0) Fail("fork");
  SetStop(child == 0 ? SIG_DFL : Stop, SIG_UNBLOCK);
  if (child == 0) {
    execv(zig, arguments);
    Fail(zig);
  }
  int status;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) Fail("waitpid");
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int count, char** arguments) {
  char* name = strrchr(arguments[0], '/');
  name = name != NULL ? name + 1 : arguments[0];
  char** command = calloc(count + 4, sizeof *command);
  if (command == NULL) Fail("calloc");
  command[0] = zig;
  if (strcmp(name, "clang++") != 0) {
    command[1] = name;
    memcpy(command + 2, arguments + 1, count * sizeof *command); /* with the NULL behind the last */
    execv(zig, command);
    Fail(zig);
  }
  command[1] = "c++";
  for (int i = 1; i < count; ++i) {
    const size_t length = strlen(arguments[i]);
    if (length > 2 && strcmp(arguments[i] + length - 2, ".c") == 0) command[1] = "cc";
  }
  command[2] = "-target";
  command[3] = target;
  memcpy(command + 4, arguments + 1, count * sizeof *command);
  SetStop(Stop, SIG_BLOCK);
  MakeScratch();
  return Run(command);
}
