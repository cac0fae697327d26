package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
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
			command := exec.Command(os.Args[0], args...)
			command.Env = append(os.Environ(), asCommand+"=1", "KUBECONFIG="+kubeconfig)
			command.Stderr = os.Stderr
			if err := command.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- command.Wait() }()
			defer command.Process.Kill() //nolint:errcheck // it may have ended
			connection, err := silent.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer connection.Close()
			if err := command.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			select {
			case <-ended:
			case <-time.After(20 * time.Second): // two seconds on a machine that is not busy
				t.Error("the process does not end")
			}
		})
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
