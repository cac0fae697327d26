// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/test/load"
)

func TestMain(m *testing.M) { clitest.Main(m, main) }

// acceptOne accepts one connection, and keeps it open without an answer until the test ends.
func acceptOne(t *testing.T, silent net.Listener) {
	t.Helper()
	connection, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
}

// The ways in which a server is unavailable.
const (
	silent   = "silent"   // It accepts connections and never responds.
	refusing = "refusing" // It closes the first connection and refuses all others.
	hanging  = "hanging"  // It responds to GET with 200 and an empty object, and never responds to POST.
)

// startUnavailable starts an unavailable server. contacted is closed when a client waits for it, or has failed to reach
// it.
func startUnavailable(t *testing.T, how string) (address string, contacted chan struct{}) {
	t.Helper()
	contacted = make(chan struct{})
	var once sync.Once
	contact := func() { once.Do(func() { close(contacted) }) }
	if how == hanging {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				io.WriteString(w, "{}") //nolint:errcheck // the client may have ended
				return
			}
			io.Copy(io.Discard, r.Body) //nolint:errcheck // as above
			contact()
			<-r.Context().Done()
		}))
		t.Cleanup(server.Close)
		return server.Listener.Addr().String(), contacted
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var open []net.Conn
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			open = append(open, connection)
			if how == refusing {
				connection.Close()
				listener.Close()
			}
			contact()
		}
	}()
	t.Cleanup(func() {
		listener.Close()
		<-ended
		for _, connection := range open {
			connection.Close()
		}
	})
	return listener.Addr().String(), contacted
}

// TestEndsWhileServersAreUnavailable stops each command that uses a server while the server is unavailable.
func TestEndsWhileServersAreUnavailable(t *testing.T) {
	answers := recordTiny(t)
	dataset := clitest.WriteFile(t, "requests.jsonl", `{"prompt":"a"}`+"\n")
	const router = "router --namespace=n --selector=a=b --host=127.0.0.1 --metrics-port=0 --snapshot-dir=DIR "
	for name, tc := range map[string]struct {
		line string
		away []string
	}{
		"router":    {router + "--port=0", []string{silent, refusing}},
		"picker":    {router + "--endpoint-picker --ext-proc-port=0 --health-port=0", []string{silent, refusing}},
		"store":     {"store --bind-address=127.0.0.1:0 --metrics-bind-address=127.0.0.1:0 --url=file://DIR", []string{silent, refusing}},
		"manager":   {"manager --image=i --leader-elect --metrics-bind-address=0 --health-probe-bind-address=0", []string{silent, refusing}},
		"calibrate": {"calibrate --image=i --gpus=1 --config-map=m", []string{silent, refusing}},
		"profile": {
			"profile --endpoint=http://ADDRESS --model-path=" + clitest.TinyModel + " --dataset=" + dataset + " --out=DIR/trace.safetensors",
			[]string{silent, refusing, hanging},
		},
		"probe": {
			"probe --address=http://ADDRESS --model-name=m --answers=" + answers + " --listen=127.0.0.1:0",
			[]string{silent, refusing, hanging},
		},
	} {
		for _, how := range tc.away {
			t.Run(name+"/"+how, func(t *testing.T) {
				address, contacted := startUnavailable(t, how)
				dir := t.TempDir()
				args := strings.Fields(strings.NewReplacer("ADDRESS", address, "DIR", dir).Replace(tc.line))
				command := clitest.Start(t, []string{"KUBECONFIG=" + writeKubeconfig(t, address)}, args...)
				command.WaitFor(t, func() bool {
					select {
					case <-contacted:
						return true
					default:
						return false
					}
				})
				command.Terminate(t) //nolint:errcheck // the exit code depends on what the command has done
			})
		}
	}
}

// TestStoreClientsEnd stops the commands that fetch from or publish in an artifact store while the store is
// unavailable.
func TestStoreClientsEnd(t *testing.T) {
	token := clitest.WriteFile(t, "token", "token")
	issuer := httptest.NewTLSServer(nil)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: issuer.Certificate().Raw})
	issuer.Close()
	manifest := profile.Manifest{ModelDigest: strings.Repeat("ab", 32), DatasetDigest: strings.Repeat("cd", 32)}
	for name, run := range map[string]func(context.Context, connectStore, string) error{
		"fetch": func(ctx context.Context, connect connectStore, dir string) error {
			flags := fetchFlags{namespace: "ns", planDigest: strings.Repeat("ab", 32), out: filepath.Join(dir, "plan"), wait: time.Hour}
			return flags.fetch(ctx, connect)
		},
		"profile": func(ctx context.Context, connect connectStore, _ string) error {
			o := profileOptions{scope: "ns/" + manifest.ID(), model: clitest.TinyModel}
			_, err := profileToStore(ctx, connect, o, manifest, nil, nil)
			return err
		},
	} {
		for _, how := range []string{silent, refusing} {
			t.Run(name+"/"+how, func(t *testing.T) {
				address, contacted := startUnavailable(t, how)
				connect := func(retryFor time.Duration) (*access.Client, error) {
					return access.NewClient(access.Config{URL: "https://" + address, CA: ca, TokenFile: token, RetryFor: retryFor})
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				ended := make(chan error, 1)
				go func() { ended <- run(ctx, connect, t.TempDir()) }()
				select {
				case err := <-ended:
					t.Fatalf("the command does not wait for the store: %v", err)
				case <-contacted:
				}
				cancel()
				if err := clitest.EndsInTime(t, ended); err == nil {
					t.Error("the command succeeded")
				}
			})
		}
	}
}

// TestReshuffleEnds stops a run that waits for another run. The next run is not blocked.
func TestReshuffleEnds(t *testing.T) {
	dir := t.TempDir()
	permutation, out := filepath.Join(dir, "gate-permutation.json"), filepath.Join(dir, "out")
	writePermutation(t, permutation)
	lock, err := filelock.Wait(t.Context(), filepath.Join(dir, ".out.lock"))
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--model", clitest.TinyModel, "--permutation", permutation, "--out", out}
	command := clitest.Start(t, nil, append([]string{"reshuffle"}, args...)...)
	command.WaitFor(t, func() bool { return strings.Contains(command.Output(t), "Waiting for another run") })
	if err := command.Terminate(t); err == nil {
		t.Error("the run succeeded")
	}
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the run that was stopped leaves an output: %v", err)
	}
	lock.Release()
	if code, _, message := runReshuffleCommand(t, args...); code != 0 {
		t.Errorf("the next run has exit code %d: %s", code, message)
	}
}

// TestSecondSignal ends the shutdown delay of a router.
func TestSecondSignal(t *testing.T) {
	address, _ := startUnavailable(t, silent)
	dir := t.TempDir()
	router := clitest.Start(t, []string{"KUBECONFIG=" + writeKubeconfig(t, address)}, "router", "--namespace=n", "--selector=a=b",
		"--host=127.0.0.1", "--port=0", "--metrics-port=0", "--snapshot-dir="+dir, "--shutdown-delay=1h")
	router.WaitFor(t, func() bool { return strings.Contains(router.Output(t), `"Serving"`) })
	if err := router.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	router.WaitFor(t, func() bool { return strings.Contains(router.Output(t), `"Draining"`) })
	for deadline := time.Now().Add(load.Scale(20 * time.Second)); ; { // the router may not handle the first of these signals yet
		router.Process.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended
		select {
		case err := <-router.Ended:
			if err != nil {
				t.Error(err)
			}
			return
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatal("the process does not end")
		}
	}
}

// writeKubeconfig writes a kubeconfig for an API server address and returns its path.
func writeKubeconfig(t *testing.T, address string) string {
	t.Helper()
	return clitest.WriteFile(t, "kubeconfig", fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c",
		"contexts":[{"name":"c","context":{"cluster":"c"}}],"clusters":[{"name":"c","cluster":{"server":"http://%s"}}]}`, address))
}

// A plan on disk requires neither the store nor its token.
func TestReadsAPlanOnDiskWithoutAToken(t *testing.T) {
	t.Setenv(artifact.URLVariable, "https://127.0.0.1:1")
	t.Setenv(artifact.CAVariable, "no certificate")
	from, _ := samplePlan(t, "dp")
	_, a, err := plan.Read(from)
	if err != nil {
		t.Fatal(err)
	}
	connect := interruptedStore(t, 0)
	client, err := connect(0)
	if err == nil {
		err = bundle.Publish(t.Context(), client, "ns", a, nil)
	}
	digest, dir := a.Digest, filepath.Join(t.TempDir(), "plan")
	if err == nil {
		err = bundle.Fetch(t.Context(), client, "ns", digest, dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := planFetcher("ns")(t.Context(), digest, dir); err != nil {
		t.Error(err)
	}
	flags := fetchFlags{namespace: "ns", planDigest: digest, out: dir}
	if err := flags.fetch(t.Context(), access.FromPod); err != nil {
		t.Error(err)
	}
	if err := planFetcher("ns")(t.Context(), digest, filepath.Join(dir, "other")); err == nil {
		t.Error("a plan was read that is not on disk")
	}
}
