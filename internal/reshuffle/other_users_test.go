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

// runAs makes or finds an output as another user, and returns what the run said.
func runAs(t *testing.T, user uint32, o Options) (string, error) {
	t.Helper()
	return workAs(t, user, childWork{Model: o.Model, Out: o.Out, Permutation: o.Permutation, Limit: o.Limit})
}

func workAs(t *testing.T, user uint32, work childWork) (string, error) {
	t.Helper()
	cmd := childCommand(t, work)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	said, err := cmd.CombinedOutput()
	return string(said), err
}

func mustRunAs(t *testing.T, user uint32, o Options) {
	t.Helper()
	if said, err := runAs(t, user, o); err != nil {
		t.Errorf("user %d: %v: %s", user, err, said)
	}
}

// newOpenShared is a directory of outputs in which every user may write.
func newOpenShared(t *testing.T, outputs int) *shared {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can become other users")
	}
	s := newShared(t, outputs)
	// Temporary directories are closed to others.
	err := errors.Join(os.Chmod(filepath.Dir(s.model), 0o755), os.Chmod(filepath.Dir(s.dir), 0o755), os.Chmod(s.dir, 0o777))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// An output is found by whoever runs, whatever the umask of the one that made it; its time of use is that of the last.
func TestAnotherUsersOutput(t *testing.T) {
	s := newOpenShared(t, 2)
	defer syscall.Umask(syscall.Umask(0o077))
	mustRunAs(t, userA, s.work[0])
	s.used(t, 0, time.Hour)
	mustRunAs(t, userB, s.work[0])
	if time.Since(lastUse(t, s.work[0].Out)) > time.Minute {
		t.Error("the use by another user did not count")
	}
	sameTensors(t, expected(s.tensors, s.work[0].Permutation), readAll(t, s.work[0].Out))
}

// Earlier versions made files that their user alone could write.
func TestClosedGuards(t *testing.T) {
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
		t.Error("the use by another user did not count")
	}
	closed()
	hold, err := newHold(out)
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Release()
	mustRunAs(t, userB, s.work[0])
	if free(t, out) || time.Since(lastUse(t, out)) < time.Minute {
		t.Error("the file of use was replaced although it was held")
	}
}

// What a run of another user has left is taken over where that user lets it.
func TestAnotherUsersWorkplace(t *testing.T) {
	s := newOpenShared(t, 1)
	j, err := newJob(t.Context(), s.work[0])
	if err != nil {
		t.Fatal(err)
	}
	j.close()
	workplace := workplaceOf(j.out, identity(j.identity, j.Permutation.Digest()))
	if err := errors.Join(os.Mkdir(workplace, 0o777), os.Chmod(workplace, 0o777), os.Chown(workplace, userA, userA)); err != nil {
		t.Fatal(err)
	}
	mustRunAs(t, userB, s.work[0])
	sameTensors(t, expected(s.tensors, s.work[0].Permutation), readAll(t, s.work[0].Out))
}

// A link in the place of a workplace would lead to a directory that is then emptied.
func TestWorkplaceThatIsALink(t *testing.T) {
	m := generators["qwen3_moe"](1)
	o := Options{Model: m.write(t, 30), Permutation: m.permutation(m.layers...), Out: filepath.Join(t.TempDir(), "out")}
	j, err := newJob(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	j.close()
	kept := filepath.Join(t.TempDir(), "kept")
	writeFile(t, kept, []byte("x"))
	workplace := workplaceOf(j.out, identity(j.identity, j.Permutation.Digest()))
	if err := os.Symlink(filepath.Dir(kept), workplace); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), workplace+" is a link") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
}

// What a run of another user has left, and keeps closed, keeps nobody from the output: it is counted until that user comes back.
// With the sticky bit a directory lets nobody remove the files of others, such as that of the first use.
func TestAnotherUsersClosedWorkplace(t *testing.T) {
	for name, mode := range map[string]os.FileMode{"open": 0o777, "sticky": os.ModeSticky | 0o777} {
		t.Run(name, func(t *testing.T) {
			s := newOpenShared(t, 2)
			if err := os.Chmod(s.dir, mode); err != nil {
				t.Fatal(err)
			}
			s.testClosedWorkplace(t)
		})
	}
}

func (s *shared) testClosedWorkplace(t *testing.T) {
	t.Helper()
	for _, o := range s.work {
		if said, err := workAs(t, userA, childWork{Model: o.Model, Out: o.Out, Permutation: o.Permutation, DieAt: 2}); err == nil {
			t.Fatalf("the run was not killed: %s", said)
		}
	}
	leftOf := func(i int) (bytes int64) {
		t.Helper()
		paths, err := workplaces(s.work[i].Out)
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
	said, err := runAs(t, userB, first)
	for _, part := range []string{fmt.Sprintf("out-0 (%d bytes, left by another user)", left[0]), fmt.Sprintf("out-1 (%d bytes, of another user)", left[1])} {
		if err == nil || !strings.Contains(said, part) {
			t.Errorf("%v: %s does not tell %q", err, said, part)
		}
	}
	first.Limit++
	mustRunAs(t, userB, first)
	sameTensors(t, expected(s.tensors, first.Permutation), readAll(t, first.Out))
	s.used(t, 0, time.Hour)
	second.Limit = s.sizes[1] + left[0] + left[1]
	mustRunAs(t, userB, second)
	if got := s.there(t); got != "1" || leftOf(0) != left[0] || leftOf(1) != left[1] {
		t.Errorf("%s are there, want 1; %d and %d bytes are left, want %d", got, leftOf(0), leftOf(1), left)
	}
	mustRunAs(t, userA, second)
	if leftOf(1) != 0 {
		t.Error("who has left it finds the output, and leaves it still")
	}
}

// A run makes room among its user's outputs; those of others count, and stay whole.
func TestLimitKeepsOutputsOfOthers(t *testing.T) {
	s := newOpenShared(t, 4)
	mustRunAs(t, userA, s.work[0])
	mustRunAs(t, userB, s.work[1])
	s.used(t, 0, 2*time.Hour)
	s.used(t, 1, time.Hour)
	said, err := runAs(t, userB, s.limited(2, 1))
	if err == nil || !strings.Contains(said, "out-0 (") || !strings.Contains(said, "of another user)") {
		t.Errorf("%v: %s", err, said)
	}
	mustRunAs(t, userB, s.limited(2, 2))
	if got := s.there(t); got != "0 2" {
		t.Errorf("%s are there, want 0 2", got)
	}
	// A lock that cannot even be looked at.
	path := hidden(s.work[0].Out, lockSuffix)
	writeFile(t, path, nil)
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	s.used(t, 2, time.Hour)
	mustRunAs(t, userB, s.limited(3, 2))
	if got := s.there(t); got != "0 3" {
		t.Errorf("%s are there, want 0 3", got)
	}
}
