// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/ptr"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/test/metricsdoc"
	"github.com/semmoe/operator/test/poll"
)

// The sequence of a deployment: a profiling pod stores its result, the manager finds the result by the inputs and
// stores tables, and a router reads the tables. The sweep removes unreferenced artifacts.
func TestProfilePlanRoute(t *testing.T) {
	store := startDefault(t, t.TempDir())
	ctx := t.Context()
	profile := clientFor(t, store.address, podToken(t, profilePod("profile")))
	manager := clientFor(t, store.address, managerToken(t))
	router := clientFor(t, store.address, podToken(t, makePod("router", map[string]string{"semmoe.io/component": "router"}, nil, "ReplicaSet")))

	trace, _ := randomBytes(t, 5<<20)
	digest, err := profile.Put(ctx, scopeA, io.MultiReader(bytes.NewReader(trace))) // not an io.Seeker
	if err != nil {
		t.Fatal(err)
	}
	if won, err := profile.Publish(ctx, scopeA, digest); err != nil || won != digest {
		t.Errorf("publish: %s, %v", won, err)
	}
	if _, err := profile.Published(ctx, scopeA); err != nil {
		t.Error(err)
	}

	found, err := manager.Published(ctx, scopeA)
	if err != nil || found != digest {
		t.Fatalf("published %s, %v", found, err)
	}
	if got, err := fetch(ctx, manager, scopeA, found); err != nil || !bytes.Equal(got, trace) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	tables, _ := randomBytes(t, 1<<20)
	file, err := os.Open(writeFile(t, "skipped"+string(tables)))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.Seek(7, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	tablesDigest, err := manager.Put(ctx, scopeB, file)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := fetch(ctx, router, scopeB, tablesDigest); err != nil || !bytes.Equal(got, tables) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if list, err := router.List(ctx, scopeB); err != nil || len(list) != 1 || list[0].Digest != tablesDigest || list[0].Size != 1<<20 {
		t.Errorf("list: %v, %v", list, err)
	}

	day := 24 * time.Hour
	if deleted, err := manager.Sweep(ctx, nil, day, time.Now()); err != nil || len(deleted) != 0 {
		t.Errorf("before the retention is over: %v, %v", deleted, err)
	}
	deleted, err := manager.Sweep(ctx, sets.New(tablesDigest), day, time.Now().Add(2*day))
	if err != nil || len(deleted) != 1 || deleted[0].Digest != digest || deleted[0].Scope != scopeA {
		t.Errorf("swept: %v, %v", deleted, err)
	}
	if _, err := manager.Published(ctx, scopeA); !errors.Is(err, artifact.ErrNotFound) {
		t.Errorf("result of a swept scope: error %v", err)
	}
	if all, err := manager.ListAll(ctx); err != nil || len(all) != 1 || all[0].Scope != scopeB {
		t.Errorf("left: %v, %v", all, err)
	}
	if _, err := fetch(ctx, router, scopeB, digest); !errors.Is(err, artifact.ErrNotFound) {
		t.Errorf("get of a missing artifact: error %v", err)
	}
}

func fetch(ctx context.Context, c *access.Client, scope artifact.Scope, digest artifact.Digest) ([]byte, error) {
	r, err := c.Get(ctx, scope, digest)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func TestTokens(t *testing.T) {
	dir := t.TempDir()
	store := startDefault(t, dir)
	bound := createPod(t, profilePod("bound"))
	good := token(t, "team-a", "default", bound, artifact.Audience)

	gone := createPod(t, profilePod("gone"))
	orphaned := token(t, "team-a", "default", gone, artifact.Audience)
	if err := api.CoreV1().Pods("team-a").Delete(t.Context(), gone.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	other := profilePod("other")
	other.Labels["semmoe.io/inputs"] = "ffffffffffffffff"
	elsewhere := profilePod("elsewhere")
	elsewhere.Namespace = "team-b"
	done := createPod(t, profilePod("done"))
	done.Status.Phase = corev1.PodSucceeded
	if _, err := api.CoreV1().Pods("team-a").UpdateStatus(t.Context(), done, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	past := func(claims map[string]any) {
		claims["iat"], claims["nbf"], claims["exp"] = time.Now().Add(-2*time.Hour).Unix(), time.Now().Add(-2*time.Hour).Unix(), time.Now().Add(-time.Hour).Unix()
	}
	cases := map[string]struct {
		token string
		want  error
		text  string
	}{
		"the pod's own":                    {good, nil, ""},
		"for several audiences":            {token(t, "team-a", "default", bound, artifact.Audience, "other.example"), nil, ""},
		"the same, signed again":           {resign(t, good, func(map[string]any) {}), nil, ""},
		"for the API server":               {token(t, "team-a", "default", bound), artifact.ErrUnauthenticated, "not valid for audience"},
		"for another service":              {token(t, "team-a", "default", bound, "other.example"), artifact.ErrUnauthenticated, "not valid for audience"},
		"bound to no pod":                  {token(t, "team-a", "default", nil, artifact.Audience), artifact.ErrUnauthenticated, "not bound to a pod"},
		"expired":                          {resign(t, good, past), artifact.ErrUnauthenticated, "not valid"},
		"of a pod that is gone":            {orphaned, artifact.ErrUnauthenticated, "not valid"},
		"forged":                           {good[:len(good)-8] + "AAAAAAAA", artifact.ErrUnauthenticated, "not valid"},
		"nonsense":                         {"nonsense", artifact.ErrUnauthenticated, "not valid"},
		"too long":                         {strings.Repeat("x", maxToken+1), artifact.ErrUnauthenticated, "bearer token"},
		"of a pod of another profile":      {podToken(t, other), artifact.ErrForbidden, `inputs "ffffffffffffffff"`},
		"of a pod of another namespace":    {podToken(t, elsewhere), artifact.ErrForbidden, "only of its own"},
		"of a pod that has ended":          {token(t, "team-a", "default", done, artifact.Audience), artifact.ErrForbidden, "the pod has ended"},
		"of the manager":                   {managerToken(t), nil, ""},
		"of the manager, wrong audience":   {token(t, "semmoe-system", "semmoe-manager", nil), artifact.ErrUnauthenticated, "not valid for audience"},
		"of the manager's other namespace": {token(t, "team-b", "default", nil, artifact.Audience), artifact.ErrUnauthenticated, "not bound to a pod"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := clientFor(t, store.address, tc.token)
			digest, putErr := c.Put(t.Context(), scopeA, strings.NewReader(name))
			_, listErr := c.List(t.Context(), scopeA)
			for _, err := range []error{putErr, listErr} {
				if !errors.Is(err, tc.want) || err != nil && !strings.Contains(err.Error(), tc.text) {
					t.Errorf("error %v, want %v with %q", err, tc.want, tc.text)
				}
			}
			if stored := digest != "" && fileExists(dir, artifactKey(scopeA, digest)); stored != (tc.want == nil) {
				t.Errorf("stored: %t", stored)
			}
		})
	}
	t.Run("none", func(t *testing.T) {
		response, err := rawClient(t).Get("https://" + store.address + "/v1/artifacts")
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusUnauthorized {
			t.Errorf("status %s", response.Status)
		}
	})
	t.Run("only the manager lists and deletes", func(t *testing.T) {
		c := clientFor(t, store.address, good)
		if _, err := c.ListAll(t.Context()); !errors.Is(err, artifact.ErrForbidden) {
			t.Errorf("list all: error %v", err)
		}
		list, err := c.List(t.Context(), scopeA)
		if err != nil || len(list) == 0 {
			t.Fatal(list, err)
		}
		if err := c.Delete(t.Context(), list[0]); !errors.Is(err, artifact.ErrForbidden) {
			t.Errorf("delete: error %v", err)
		}
	})
}

func fileExists(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

// rawClient sends requests that the client of package artifact does not send.
func rawClient(t *testing.T) *http.Client {
	t.Helper()
	return &http.Client{Transport: &http.Transport{TLSClientConfig: clientTLS(t)}}
}

func send(t *testing.T, store *running, token, method, path string, body io.Reader, length int64) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, "https://"+store.address+path, body)
	if err != nil {
		t.Fatal(err)
	}
	request.ContentLength = length
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := rawClient(t).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

func TestProtocolRefusals(t *testing.T) {
	dir := t.TempDir()
	options := testOptions(dir)
	options.MaxArtifactBytes = 1 << 20
	store := start(t, storeConfig(environment.Config), options)
	manager := managerToken(t)
	data, digest := randomBytes(t, 1000)
	large, largeDigest := randomBytes(t, 1<<20+1)
	path := "/v1/" + scopeA.String() + "/artifacts/"
	cases := map[string]struct {
		method, path string
		body         io.Reader
		length       int64
		status       int
		text         string
	}{
		"wrong digest":        {"PUT", path + strings.Repeat("0", 64), bytes.NewReader(data), 1000, 422, "sha256 is " + string(digest)},
		"wrong digest, large": {"PUT", path + strings.Repeat("0", 64), bytes.NewReader(large[:1<<20]), 1 << 20, 422, "sha256 is"},
		"no length":           {"PUT", path + string(digest), io.MultiReader(bytes.NewReader(data)), -1, 411, "Content-Length"},
		"too large":           {"PUT", path + string(largeDigest), bytes.NewReader(large), int64(len(large)), 413, "the maximum is 1048576"},
		"no digest":           {"PUT", path + "latest", bytes.NewReader(data), 1000, 400, "64 lower-case"},
		"unknown kind":        {"GET", "/v1/namespaces/team-a/models/12345678/artifacts", nil, 0, 400, "must be"},
		"bad id":              {"GET", "/v1/namespaces/team-a/plans/a.b/artifacts", nil, 0, 400, "8 to 63"},
		"escaped path":        {"GET", "/v1/namespaces/team-a/plans/..%2f..%2fetc/artifacts", nil, 0, 400, "8 to 63"},
		"delete without time": {"DELETE", path + string(digest), nil, 0, 400, "modified"},
		"empty result":        {"PUT", "/v1/" + scopeA.String() + "/result", strings.NewReader("{}"), 2, 400, "digest"},
		"malformed result":    {"PUT", "/v1/" + scopeA.String() + "/result", strings.NewReader("x"), 1, 400, "body"},
		"absent result":       {"GET", "/v1/" + scopeA.String() + "/result", nil, 0, 404, "no result"},
		"absent artifact":     {"GET", path + string(digest), nil, 0, 404, "does not exist"},
		"unknown route":       {"GET", "/v2", nil, 0, 404, ""},
		"unknown method":      {"POST", path + string(digest), nil, 0, 405, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			status, text := send(t, store, manager, tc.method, tc.path, tc.body, tc.length)
			if status != tc.status || !strings.Contains(text, tc.text) {
				t.Errorf("%d %s, want %d with %q", status, text, tc.status, tc.text)
			}
			if left := files(t, dir); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
	t.Run("plain HTTP", func(t *testing.T) {
		response, err := http.Get("http://" + store.address + "/v1/artifacts")
		if err == nil {
			defer response.Body.Close()
			if response.StatusCode < 400 {
				t.Errorf("status %s", response.Status)
			}
		}
	})
}

func TestClientDetectsFlippedByte(t *testing.T) {
	dir := t.TempDir()
	store := startDefault(t, dir)
	c := clientFor(t, store.address, managerToken(t))
	for _, size := range []int{100, 4 << 20} {
		data, _ := randomBytes(t, size)
		digest, err := c.Put(t.Context(), scopeA, bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		data[size/2] ^= 1
		if err := os.WriteFile(filepath.Join(dir, artifactKey(scopeA, digest)), data, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := fetch(t.Context(), c, scopeA, digest); !errors.Is(err, artifact.ErrCorrupt) {
			t.Errorf("%d bytes: error %v, want %v", size, err, artifact.ErrCorrupt)
		}
		poll.Until(t, "the damaged bytes are gone", func() bool {
			_, err := os.Stat(filepath.Join(dir, artifactKey(scopeA, digest)))
			return os.IsNotExist(err)
		})
		if _, err := fetch(t.Context(), c, scopeA, digest); !errors.Is(err, artifact.ErrNotFound) {
			t.Errorf("%d bytes, read again: error %v, want %v", size, err, artifact.ErrNotFound)
		}
	}
	if text := scrape(t, store, "/metrics"); !strings.Contains(text, "semmoe_store_corrupt_reads_total 2") {
		t.Error("the damage is not counted")
	}
}

func scrape(t *testing.T, store *running, path string) string {
	t.Helper()
	response, err := http.Get("http://" + store.metrics + path)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v", path, response.Status, err)
	}
	return string(text)
}

func TestProbesAndMetrics(t *testing.T) {
	store := startDefault(t, t.TempDir())
	c := clientFor(t, store.address, managerToken(t))
	if _, err := c.Put(t.Context(), scopeA, strings.NewReader("abc")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.List(t.Context(), scopeA); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if text := scrape(t, store, path); text != "ok\n" {
			t.Errorf("%s: %q", path, text)
		}
	}
	text := scrape(t, store, "/metrics")
	for _, line := range []string{
		`semmoe_store_requests_total{code="201",operation="put"} 1`,
		`semmoe_store_requests_total{code="200",operation="list"} 1`,
		`semmoe_store_transferred_bytes_total{direction="in"} 3`,
		`semmoe_store_token_reviews_total{result="accepted"} 1`, // the second request used the cache
		"semmoe_store_free_bytes ",
		"semmoe_store_capacity_bytes ",
		`semmoe_store_requests_total{code="507",operation="put"} 0`,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("no %s", line)
		}
	}
}

func TestMetricsAreDocumented(t *testing.T) {
	registry := prometheus.NewRegistry()
	m := newMetrics(registry)
	store, err := open(t.Context(), "file://"+t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	watchSpace(registry, store)
	m.seconds.WithLabelValues("get")
	m.bytes.WithLabelValues("in")
	m.reviews.WithLabelValues("accepted")
	metricsdoc.Check(t, "../../../docs/metrics.md", "store", registry)
}

// While the API server is unreachable, known callers are served, and other callers get an error that they retry.
func TestWithoutAPIServer(t *testing.T) {
	var cut atomic.Bool
	config := storeConfig(environment.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if cut.Load() {
				return nil, errors.New("network is unreachable")
			}
			return next.RoundTrip(r)
		})
	})
	store := start(t, config, testOptions(t.TempDir()))
	known := clientFor(t, store.address, managerToken(t))
	digest, err := known.Put(t.Context(), scopeB, strings.NewReader("tables"))
	if err != nil {
		t.Fatal(err)
	}
	// Must be called before clientFor, which reads the certificate from the API server.
	unknown := clientFor(t, store.address, podToken(t, makePod("router", map[string]string{"semmoe.io/component": "router"}, nil, "ReplicaSet")))
	cut.Store(true)
	if got, err := fetch(t.Context(), known, scopeB, digest); err != nil || string(got) != "tables" {
		t.Errorf("known caller: %q, %v", got, err)
	}
	var status *artifact.StatusError
	if _, err := unknown.Get(t.Context(), scopeB, digest); !errors.As(err, &status) || status.Code != http.StatusServiceUnavailable {
		t.Errorf("unknown caller: error %v", err)
	}
	cut.Store(false)
	if got, err := fetch(t.Context(), unknown, scopeB, digest); err != nil || string(got) != "tables" {
		t.Errorf("unknown caller after the API server is back: %q, %v", got, err)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A client with retries reconnects to a store that restarts with the same address and certificate.
func TestRetryOverRestart(t *testing.T) {
	dir := t.TempDir()
	options := testOptions(dir)
	first := start(t, storeConfig(environment.Config), options)
	c, err := access.NewClient(access.Config{
		URL: "https://" + first.address, CAFile: caFile(t), TokenFile: writeFile(t, managerToken(t)), RetryFor: 20 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	first.stop()
	if err := <-first.ended; err != nil {
		t.Fatal(err)
	}
	close(first.ended)
	type outcome struct {
		digest artifact.Digest
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		digest, err := c.Put(context.Background(), scopeA, strings.NewReader("result of hours"))
		done <- outcome{digest, err}
	}()
	options.BindAddress = first.address
	start(t, storeConfig(environment.Config), options)
	got := <-done
	if got.err != nil || !fileExists(dir, artifactKey(scopeA, got.digest)) {
		t.Errorf("%+v", got)
	}
}

func TestConcurrentClients(t *testing.T) {
	dir := t.TempDir()
	store := startDefault(t, dir)
	data, digest := randomBytes(t, 1<<20)
	var group sync.WaitGroup
	for i := range 12 {
		c := clientFor(t, store.address, podToken(t, profilePod(fmt.Sprint("p", i))))
		group.Go(func() {
			if got, err := c.Put(context.Background(), scopeA, bytes.NewReader(data)); err != nil || got != digest {
				t.Errorf("put: %s, %v", got, err)
			}
			if got, err := fetch(context.Background(), c, scopeA, digest); err != nil || !bytes.Equal(got, data) {
				t.Errorf("get: %d bytes, %v", len(got), err)
			}
		})
	}
	group.Wait()
	if diff := cmp.Diff([]string{artifactKey(scopeA, digest)}, files(t, dir)); diff != "" {
		t.Error(diff)
	}
}

func TestOptionsValidate(t *testing.T) {
	cases := map[string]struct {
		change func(*Options)
		want   string
	}{
		"good":               {func(*Options) {}, ""},
		"key without a file": {func(o *Options) { o.TLSKeyFile = "k" }, "set both"},
		"no authority":       {func(o *Options) { o.Authority.Name = "" }, "certificate authority"},
		"no hosts":           {func(o *Options) { o.TLSHosts = nil }, "TLS hosts"},
		"own certificate":    {func(o *Options) { o.TLSCertFile, o.TLSKeyFile, o.TLSHosts = "c", "k", nil }, ""},
		"no manager":         {func(o *Options) { o.Manager.Namespace = "" }, "manager"},
		"no size":            {func(o *Options) { o.MaxArtifactBytes = 0 }, "must be positive"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			options := testOptions(t.TempDir())
			tc.change(&options)
			err := options.validate()
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func clientTLS(t *testing.T) *tls.Config {
	t.Helper()
	pool, err := cert.NewPool(caFile(t))
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
}
