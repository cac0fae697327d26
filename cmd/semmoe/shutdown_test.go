package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/test/load"
)

// asCommand makes the test binary run the command itself.
const asCommand = "SEMMOE_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// runningCommand is a process of this binary.
type runningCommand struct {
	*exec.Cmd
	output *bytes.Buffer
	ended  chan error
}

// startCommand starts this binary as semmoe with some arguments, and kills it when the test ends.
func startCommand(t *testing.T, env []string, args ...string) *runningCommand {
	t.Helper()
	c := &runningCommand{Cmd: exec.Command(os.Args[0], args...), output: &bytes.Buffer{}, ended: make(chan error, 1)}
	c.Env = append(append(os.Environ(), asCommand+"=1"), env...)
	c.Stdout, c.Stderr = c.output, c.output
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		c.ended <- c.Wait()
	}()
	t.Cleanup(func() {
		c.Process.Kill() //nolint:errcheck // it may have ended
		<-waited
		if t.Failed() {
			t.Logf("output of %v:\n%s", args, c.output)
		}
	})
	return c
}

// terminate sends SIGTERM, waits for the end of the process, and returns its error. The limit is far above two seconds, for busy machines,
// and far below the timeouts of requests.
func (c *runningCommand) terminate(t *testing.T) error {
	t.Helper()
	begin := time.Now()
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-c.ended:
		t.Logf("ended %v after SIGTERM: %v", time.Since(begin).Round(time.Millisecond), err)
		return err
	case <-time.After(load.Scale(20 * time.Second)):
		t.Fatal("the process does not end")
		return nil
	}
}

// acceptOne accepts one connection, and keeps it open without an answer until the test ends.
func acceptOne(t *testing.T, silent net.Listener) {
	t.Helper()
	connection, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
}

// TestEndsWhileTheAPIServerIsSilent stops each long-running command while the API server accepts connections and never answers.
func TestEndsWhileTheAPIServerIsSilent(t *testing.T) {
	for name, args := range map[string][]string{
		"router":  {"router", "--namespace=n", "--selector=a=b", "--host=127.0.0.1", "--port=0", "--metrics-port=0"},
		"picker":  {"router", "--namespace=n", "--selector=a=b", "--host=127.0.0.1", "--endpoint-picker", "--ext-proc-port=0", "--health-port=0", "--metrics-port=0"},
		"store":   {"store", "--bind-address=127.0.0.1:0", "--metrics-bind-address=127.0.0.1:0"},
		"manager": {"manager", "--image=i", "--leader-elect", "--metrics-bind-address=0", "--health-probe-bind-address=0"},
	} {
		t.Run(name, func(t *testing.T) {
			silent, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer silent.Close()
			dir := t.TempDir()
			kubeconfig := filepath.Join(dir, "kubeconfig")
			text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c"}}],
				"clusters":[{"name":"c","cluster":{"server":"http://%s"}}]}`, silent.Addr())
			if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			switch name {
			case "store":
				args = append(args, "--url=file://"+dir)
			case "router", "picker":
				args = append(args, "--snapshot-dir="+dir)
			}
			command := startCommand(t, []string{"KUBECONFIG=" + kubeconfig}, args...)
			acceptOne(t, silent)
			command.terminate(t)
		})
	}
}

// TestEngineEnds stops an engine that has no requests, and one that waits for its other nodes, while clients hold silent connections.
func TestEngineEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		status int
	}{
		"idle":              {nil, http.StatusOK},
		"waiting for nodes": {[]string{"--tp-size=2", "--ep-size=2", "--nnodes=2"}, http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			address := freeAddress(t)
			_, port, err := net.SplitHostPort(address)
			if err != nil {
				t.Fatal(err)
			}
			addresses := []string{address}
			args := append([]string{"engine", "--model-path=" + tinyModel, "--host=127.0.0.1", "--port=" + port}, tc.args...)
			if tc.args != nil {
				meeting := freeAddress(t)
				args, addresses = append(args, "--dist-init-addr="+meeting), append(addresses, meeting)
			}
			engine := startCommand(t, nil, args...)
			for _, address := range addresses {
				waitFor(t, engine, func() bool {
					connection, err := net.Dial("tcp", address)
					if err == nil {
						t.Cleanup(func() { connection.Close() })
					}
					return err == nil
				})
			}
			waitFor(t, engine, func() bool {
				response, err := http.Get("http://" + address + "/health")
				if err != nil {
					return false
				}
				response.Body.Close()
				return response.StatusCode == tc.status
			})
			if err := engine.terminate(t); err != nil {
				t.Error(err)
			}
		})
	}
}

// waitFor waits until a condition holds, or the process has ended.
func waitFor(t *testing.T, c *runningCommand, holds func() bool) {
	t.Helper()
	for !holds() {
		select {
		case err := <-c.ended:
			t.Fatalf("the process has ended: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// A plan that is on disk needs no store, and no token for it.
func TestReadsAPlanOnDiskWithoutAToken(t *testing.T) {
	t.Setenv(access.URLVariable, "https://127.0.0.1:1")
	t.Setenv(access.CAVariable, "no certificate")
	from, _ := solved(t, "dp")
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
		t.Error("a plan that is not on disk was read")
	}
}
