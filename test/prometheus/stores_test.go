// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/artifact/store"
)

// runningStore is a running artifact store.
type runningStore struct{ dir, address, metrics string }

// startStore runs an artifact store on a directory until the test ends.
func (c *cluster) startStore(t *testing.T, dir string) *runningStore {
	t.Helper()
	s := &runningStore{dir: dir}
	options := store.Options{
		URL: "file://" + s.dir, BindAddress: "127.0.0.1:0", MetricsAddress: "127.0.0.1:0",
		Authority: types.NamespacedName{Namespace: own, Name: "semmoe-store-ca"}, TLSHosts: []string{"127.0.0.1"},
		Manager:          types.NamespacedName{Namespace: own, Name: "semmoe-manager"},
		MaxArtifactBytes: 1 << 61, DrainTimeout: time.Second,
	}
	ctx, cancel := context.WithCancel(context.Background())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- store.Run(logr.NewContext(ctx, logr.Discard()), c.clients, options, func(service, metrics net.Addr) {
			s.address, s.metrics = service.String(), metrics.String()
			close(started)
		})
	}()
	select {
	case <-started:
	case err := <-ended:
		cancel()
		t.Fatalf("the store ended: %v", err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return s
}

// overfill announces an artifact that is larger than any disk to the store, without sending its bytes.
func (c *cluster) overfill(t *testing.T, s *runningStore) {
	t.Helper()
	token, err := os.ReadFile(c.token(t, own, "semmoe-manager", artifact.Audience))
	if err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("https://%s/v1/namespaces/%s/%s/%s/artifacts/%s", s.address, live, artifact.Profile, "0123456789abcdef", strings.Repeat("0", 64))
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url, io.LimitReader(endless{}, 1<<60))
	if err != nil {
		t.Fatal(err)
	}
	request.ContentLength = 1 << 60
	request.Header.Set("Expect", "100-continue")
	request.Header.Set("Authorization", "Bearer "+string(token))
	response, err := insecure(t, time.Minute).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if text, _ := io.ReadAll(response.Body); response.StatusCode != http.StatusInsufficientStorage {
		t.Fatalf("an artifact of 2^60 bytes: %s: %s", response.Status, text)
	}
}

// damage stores an artifact, changes its bytes on the disk, and reads it.
func (c *cluster) damage(t *testing.T, s *runningStore) {
	t.Helper()
	client, scope := c.storeClient(t, s), artifact.Scope{Namespace: live, Kind: artifact.Profile, ID: "fedcba9876543210"}
	digest, err := client.Put(t.Context(), scope, bytes.NewReader([]byte("as it was")))
	if err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(filepath.Join(s.dir, "*"+string(digest)))
	if err != nil || len(paths) != 1 {
		t.Fatalf("files %q, %v", paths, err)
	}
	if err := os.WriteFile(paths[0], []byte("as it is!"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := client.ReadAll(t.Context(), scope, digest, 100); !errors.Is(err, artifact.ErrCorrupt) {
		t.Fatalf("error %v, want %v", err, artifact.ErrCorrupt)
	}
}

type endless struct{}

func (endless) Read(into []byte) (int, error) { return len(into), nil }

// nearlyFull reports whether the store's disk is nearly full, so that the alert is correct.
func (s *runningStore) nearlyFull(t *testing.T) bool {
	t.Helper()
	var stat unix.Statfs_t
	if err := unix.Statfs(s.dir, &stat); err != nil {
		t.Fatal(err)
	}
	return stat.Bavail <= stat.Blocks/10
}

// smallDisk returns the path of a file system with the given size. A child process mounts it in separate user and mount
// namespaces and keeps it until the test ends. The test is skipped if the kernel does not allow unprivileged
// namespaces.
func smallDisk(t *testing.T, bytes int) string {
	t.Helper()
	mount := t.TempDir()
	holder := exec.Command("sh", "-c", `mount -t tmpfs -o "size=$1" tmpfs "$2" && echo mounted && exec cat`, "sh", strconv.Itoa(bytes), mount)
	holder.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	var stderr strings.Builder
	holder.Stderr = &stderr
	stdin, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Skipf("this machine does not allow the namespaces for a small disk: %v", err)
	}
	t.Cleanup(func() {
		stdin.Close()
		holder.Wait() //nolint:errcheck // ends when its input is closed
	})
	if line, _ := bufio.NewReader(stdout).ReadString('\n'); line != "mounted\n" {
		stdin.Close()
		t.Skipf("this machine does not allow to mount a small disk: %v: %s", holder.Wait(), stderr.String())
	}
	return filepath.Join("/proc", strconv.Itoa(holder.Process.Pid), "root", mount)
}

// TestStoreFillsUp checks that the alert fires on the store's metrics while its disk is nearly full, and stops when
// space is freed.
func TestStoreFillsUp(t *testing.T) {
	ctrl.SetLogger(logr.Discard())
	const capacity = 8 << 20
	disk := smallDisk(t, capacity)
	c := startCluster(t)
	full, roomy := c.startStore(t, disk), c.startStore(t, smallDisk(t, capacity))
	w := newWorld(t, c.jobs(t, map[string][]process{"semmoe-store": {{own, "full", full.metrics, ""}, {own, "roomy", roomy.metrics, ""}}}))
	// After rounds for one hour, no alert is pending.
	lasting := func() (alerts []string) {
		t.Helper()
		for range hour / 2 {
			alerts = slices.DeleteFunc(w.round(t), func(alert string) bool { return !strings.HasPrefix(alert, "SemMoEStoreFull ") })
		}
		return alerts
	}
	if alerts := lasting(); len(alerts) > 0 {
		t.Errorf("with empty disks, firing: %v", alerts)
	}

	client := c.storeClient(t, full)
	scope := artifact.Scope{Namespace: live, Kind: artifact.Profile, ID: "0123456789abcdef"}
	digest, err := client.Put(t.Context(), scope, bytes.NewReader(make([]byte, capacity/16*15)))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"SemMoEStoreFull warning semmoe-system/full"}, lasting()); diff != "" {
		t.Errorf("alerts with a sixteenth of the disk free (-want +fired):\n%s", diff)
	}

	stored, err := client.List(t.Context(), scope)
	if err != nil || len(stored) != 1 || stored[0].Digest != digest {
		t.Fatalf("the store has %v, want %s: %v", stored, digest, err)
	}
	if err := client.Delete(t.Context(), stored[0]); err != nil {
		t.Fatal(err)
	}
	if alerts := lasting(); len(alerts) > 0 {
		t.Errorf("after freeing space, firing: %v", alerts)
	}
}

// storeClient returns a client of a store with the permissions of the manager.
func (c *cluster) storeClient(t *testing.T, s *runningStore) *access.Client {
	t.Helper()
	client, err := (&access.Access{
		URL: "https://" + s.address, CA: types.NamespacedName{Namespace: own, Name: "semmoe-store-ca"},
		TokenFile: c.token(t, own, "semmoe-manager", artifact.Audience), Reader: c.Client,
	}).Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return client
}
