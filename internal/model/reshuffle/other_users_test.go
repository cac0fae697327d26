// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	userA = 60001
	userB = 60002
)

// runAs runs reshuffle as another user, and returns the log of the run.
func runAs(t *testing.T, user uint32, o Options) (string, error) {
	t.Helper()
	return workAs(t, user, childWork{Model: o.Model, Out: o.Out, Permutation: o.Permutation, Limit: o.Limit})
}

func workAs(t *testing.T, user uint32, work childWork) (string, error) {
	t.Helper()
	cmd := childCommand(t, work)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	logged, err := cmd.CombinedOutput()
	return string(logged), err
}

func mustRunAs(t *testing.T, user uint32, o Options) {
	t.Helper()
	if logged, err := runAs(t, user, o); err != nil {
		t.Errorf("user %d: %v: %s", user, err, logged)
	}
}

// newOpenShared returns a directory of outputs to which every user may write.
func newOpenShared(t *testing.T, outputs int) *shared {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can become other users")
	}
	s := newShared(t, outputs)
	// Temporary directories are not accessible to other users.
	err := errors.Join(os.Chmod(filepath.Dir(s.model), 0o755), os.Chmod(filepath.Dir(s.dir), 0o755), os.Chmod(s.dir, 0o777))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestAnotherUsersOutput checks that every user can use an output regardless of the umask of its owner, and that the
// time of use is that of the last user.
func TestAnotherUsersOutput(t *testing.T) {
	s := newOpenShared(t, 2)
	defer syscall.Umask(syscall.Umask(0o077))
	mustRunAs(t, userA, s.work[0])
	s.used(t, 0, time.Hour)
	mustRunAs(t, userB, s.work[0])
	if time.Since(lastUse(t, s.work[0].Out)) > time.Minute {
		t.Error("the use by another user did not change the time of use")
	}
	sameTensors(t, expected(s.tensors, s.work[0].Permutation), readAll(t, s.work[0].Out))
}

// TestGuardFilesOfOtherUsers covers files of earlier versions that only their owner may write.
func TestGuardFilesOfOtherUsers(t *testing.T) {
	s := newOpenShared(t, 1)
	out := s.work[0].Out
	mustRunAs(t, userA, s.work[0])
	closed := func() {
		t.Helper()
		for _, path := range []string{hidden(out, usedSuffix), hidden(out, lockSuffix)} {
			writeFile(t, path, []byte("7"))
			if err := errors.Join(os.Chown(path, userA, userA), os.Chmod(path, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		s.used(t, 0, time.Hour)
	}
	closed()
	mustRunAs(t, userB, s.work[0])
	if time.Since(lastUse(t, out)) > time.Minute {
		t.Error("the use by another user did not change the time of use")
	}
	closed()
	lease, err := newLease(out)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	mustRunAs(t, userB, s.work[0])
	if free(t, out) || time.Since(lastUse(t, out)) < time.Minute {
		t.Error("the use file was replaced despite a lease")
	}
}

// TestAnotherUsersStagingDir checks that the staging directory of another user is reused if its mode permits.
func TestAnotherUsersStagingDir(t *testing.T) {
	s := newOpenShared(t, 1)
	j, err := newJob(t.Context(), s.work[0])
	if err != nil {
		t.Fatal(err)
	}
	j.close()
	staging := stagingDir(j.out, identity(j.identity, j.Permutation.Digest()))
	if err := errors.Join(os.Mkdir(staging, 0o777), os.Chmod(staging, 0o777), os.Chown(staging, userA, userA)); err != nil {
		t.Fatal(err)
	}
	mustRunAs(t, userB, s.work[0])
	sameTensors(t, expected(s.tensors, s.work[0].Permutation), readAll(t, s.work[0].Out))
}

// TestStagingDirThatIsALink checks that a symbolic link in place of the staging directory is refused. It would lead to
// a directory that is then emptied.
func TestStagingDirThatIsALink(t *testing.T) {
	m := generators["qwen3_moe"](1)
	o := Options{Model: m.write(t, 30), Permutation: m.permutation(m.layers...), Out: filepath.Join(t.TempDir(), "out")}
	j, err := newJob(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	j.close()
	kept := filepath.Join(t.TempDir(), "kept")
	writeFile(t, kept, []byte("x"))
	staging := stagingDir(j.out, identity(j.identity, j.Permutation.Digest()))
	if err := os.Symlink(filepath.Dir(kept), staging); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), staging+" is not a directory") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
}

// TestAnotherUsersClosedStagingDir checks that a staging directory which another user has left and which this user
// cannot write does not block the output. It counts towards the limit until its owner removes it. In a directory with
// the sticky bit, users cannot remove files of others, such as the use file.
func TestAnotherUsersClosedStagingDir(t *testing.T) {
	for name, mode := range map[string]os.FileMode{"open": 0o777, "sticky": os.ModeSticky | 0o777} {
		t.Run(name, func(t *testing.T) {
			s := newOpenShared(t, 2)
			if err := os.Chmod(s.dir, mode); err != nil {
				t.Fatal(err)
			}
			s.testClosedStagingDir(t)
		})
	}
}

func (s *shared) testClosedStagingDir(t *testing.T) {
	t.Helper()
	for _, o := range s.work {
		if logged, err := workAs(t, userA, childWork{Model: o.Model, Out: o.Out, Permutation: o.Permutation, DieAt: 2}); err == nil {
			t.Fatalf("the run was not killed: %s", logged)
		}
	}
	leftOf := func(i int) (bytes int64) {
		t.Helper()
		paths, err := stagingDirs(s.work[i].Out)
		for _, path := range paths {
			size, sizeErr := treeBytes(path)
			bytes, err = bytes+size, errors.Join(err, sizeErr)
		}
		if err != nil {
			t.Error(err)
		}
		return bytes
	}
	left := [2]int64{leftOf(0), leftOf(1)}
	if left[0] == 0 || left[1] == 0 {
		t.Fatalf("%d bytes were left", left)
	}
	first, second := s.work[0], s.work[1]
	first.Limit = s.sizes[0] + left[0] + left[1] - 1
	logged, err := runAs(t, userB, first)
	for _, part := range []string{fmt.Sprintf("out-0 (%d bytes, left by another user)", left[0]), fmt.Sprintf("out-1 (%d bytes, of another user)", left[1])} {
		if err == nil || !strings.Contains(logged, part) {
			t.Errorf("%v: %s does not contain %q", err, logged, part)
		}
	}
	first.Limit++
	mustRunAs(t, userB, first)
	sameTensors(t, expected(s.tensors, first.Permutation), readAll(t, first.Out))
	s.used(t, 0, time.Hour)
	second.Limit = s.sizes[1] + left[0] + left[1]
	mustRunAs(t, userB, second)
	if got := s.there(t); got != "1" || leftOf(0) != left[0] || leftOf(1) != left[1] {
		t.Errorf("outputs %s exist, want 1; %d and %d bytes are left, want %d", got, leftOf(0), leftOf(1), left)
	}
	mustRunAs(t, userA, second)
	if leftOf(1) != 0 {
		t.Error("a later run of the owner did not remove the staging directory")
	}
}

// TestLimitKeepsOutputsOfOthers checks that a run removes only outputs of the same user. Outputs of other users count
// and stay complete.
func TestLimitKeepsOutputsOfOthers(t *testing.T) {
	s := newOpenShared(t, 4)
	mustRunAs(t, userA, s.work[0])
	mustRunAs(t, userB, s.work[1])
	s.used(t, 0, 2*time.Hour)
	s.used(t, 1, time.Hour)
	logged, err := runAs(t, userB, s.limited(2, 1))
	if err == nil || !strings.Contains(logged, "out-0 (") || !strings.Contains(logged, "of another user)") {
		t.Errorf("%v: %s", err, logged)
	}
	mustRunAs(t, userB, s.limited(2, 2))
	if got := s.there(t); got != "0 2" {
		t.Errorf("outputs %s exist, want 0 2", got)
	}
	// A lock file that this user cannot read.
	path := hidden(s.work[0].Out, lockSuffix)
	writeFile(t, path, nil)
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	s.used(t, 2, time.Hour)
	mustRunAs(t, userB, s.limited(3, 2))
	if got := s.there(t); got != "0 3" {
		t.Errorf("outputs %s exist, want 0 3", got)
	}
}
