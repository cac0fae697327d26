package alerts

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/store"
)

// runningStore is an artifact store.
type runningStore struct{ dir, address, metrics string }

func (c *cluster) startStore(t *testing.T) *runningStore {
	t.Helper()
	s := &runningStore{dir: t.TempDir()}
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

// overfill offers the store an artifact for which no disk has room. The bytes are never sent.
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

type endless struct{}

func (endless) Read(into []byte) (int, error) { return len(into), nil }

// nearlyFull tells that the disk of this machine is, so that the alert is right.
func (s *runningStore) nearlyFull(t *testing.T) bool {
	t.Helper()
	var stat unix.Statfs_t
	if err := unix.Statfs(s.dir, &stat); err != nil {
		t.Fatal(err)
	}
	return stat.Bavail <= stat.Blocks/10
}
