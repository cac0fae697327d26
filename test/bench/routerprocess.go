// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/test/ports"
)

// processArgument is the first argument of this program as one of the child processes below. Separate processes allow
// to measure the processor time of each.
const processArgument = "router-process"

// Child processes: an engine that answers immediately, a reverse proxy that decodes the JSON, one that does not, the
// request router, and the endpoint picker.
const (
	engineProcess   = "engine"
	baselineProcess = "baseline"
	plainProcess    = "plain"
	routerProcess   = "router"
	pickerProcess   = "picker"
)

// profileVariable names a directory into which child processes write processor profiles.
const profileVariable = "BENCH_PROFILES"

// usage is the resource usage of a process since its start.
type usage struct {
	CPUSeconds float64 `json:"cpu_seconds"`
	// ResidentMiB is the current resident memory, PeakMiB the maximum since the start.
	ResidentMiB float64 `json:"resident_mib"`
	PeakMiB     float64 `json:"peak_mib"`
}

// process is a running child process.
type process struct {
	address string
	// plan is the plan that answers must name; empty except for a router.
	plan    string
	command *exec.Cmd
	input   io.WriteCloser
	output  *json.Decoder
}

// startProcess starts this program as a child process, which ends when it is stopped or when this program ends.
func startProcess(ctx context.Context, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{command: exec.CommandContext(ctx, self, append([]string{processArgument}, args...)...)}
	p.command.Stderr = os.Stderr
	if p.input, err = p.command.StdinPipe(); err != nil {
		return nil, err
	}
	output, err := p.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.output = json.NewDecoder(output)
	if err := p.command.Start(); err != nil {
		return nil, err
	}
	if err := p.output.Decode(&p.address); err != nil {
		return nil, errors.Join(fmt.Errorf("failed to start process %v: %w", args, err), p.stop())
	}
	return p, nil
}

// usage asks the process for its resource usage.
func (p *process) usage() (usage, error) {
	var u usage
	if _, err := fmt.Fprintln(p.input); err != nil {
		return u, err
	}
	return u, p.output.Decode(&u)
}

func (p *process) stop() error {
	if p.input == nil { // another program
		p.command.Process.Signal(os.Interrupt) //nolint:errcheck // fails only if the process has ended
		time.AfterFunc(time.Second, func() { p.command.Process.Kill() })
		return p.command.Wait()
	}
	p.input.Close() //nolint:errcheck // fails only if the process has ended
	return p.command.Wait()
}

// runProcess runs a child process. It starts its server, prints the address, and answers each line of input with its
// resource usage.
func runProcess(ctx context.Context, args []string) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if dir := os.Getenv(profileVariable); dir != "" {
		file, err := os.Create(filepath.Join(dir, fmt.Sprintf("%s-%d.prof", args[0], os.Getpid())))
		if err != nil {
			return err
		}
		defer file.Close()
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	address, err := serveAs(ctx, args)
	if err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(address); err != nil {
		return err
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		u := usage{CPUSeconds: cpuSeconds()}
		if u.ResidentMiB, u.PeakMiB, err = residentMiB(os.Getpid()); err != nil {
			return err
		}
		if err := out.Encode(u); err != nil {
			return err
		}
	}
	return nil
}

func serveAs(ctx context.Context, args []string) (address string, err error) {
	switch {
	case len(args) == 1 && args[0] == engineProcess:
		return serve("0.0.0.0:0", http.HandlerFunc(answerAtOnce))
	case len(args) == 2 && args[0] == baselineProcess:
		return serve("127.0.0.1:0", decodingProxy(args[1]))
	case len(args) == 2 && args[0] == plainProcess:
		return serve("127.0.0.1:0", reverseProxy(args[1]))
	case len(args) == 3 && args[0] == routerProcess:
		return serveRouter(ctx, args[1], dispatch.Policy(args[2]), false)
	case len(args) == 3 && args[0] == pickerProcess:
		return serveRouter(ctx, args[1], dispatch.Policy(args[2]), true)
	}
	return "", fmt.Errorf("unknown process %v", args)
}

func serve(address string, handler http.Handler) (string, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return "", err
	}
	go http.Serve(listener, handler) //nolint:errcheck // serves until the process ends
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)), nil
}

// answerAtOnce is a minimal engine: it reads the request and answers with one token.
func answerAtOnce(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/metrics" { // for peers that read the load of engines
		io.WriteString(w, "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n") //nolint:errcheck // the client notices an error
		return
	}
	body, _ := io.ReadAll(r.Body) // the client notices an error
	if bytes.Contains(body, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 5 {
			io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\" a\"}]}\n\n") //nolint:errcheck // as above
			w.(http.Flusher).Flush()
			time.Sleep(5 * time.Millisecond)
		}
		io.WriteString(w, "data: [DONE]\n\n") //nolint:errcheck // as above
		return
	}
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, `{"id":"cmpl-1","object":"text_completion","model":"bench","choices":[{"index":0,"text":" a","finish_reason":"length"}],`+ //nolint:errcheck // as above
		`"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001}}`)
}

// decodingProxy is the baseline of the router's cost: a reverse proxy that reads and decodes the body of each request.
func decodingProxy(engine string) http.Handler {
	proxy := reverseProxy(engine)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		var request struct {
			Model       string  `json:"model"`
			Prompt      string  `json:"prompt"`
			MaxTokens   int     `json:"max_tokens"`
			Temperature float64 `json:"temperature"`
		}
		if err := json.Unmarshal(body, &request); err != nil || request.Prompt == "" {
			http.Error(w, "not a completion request", http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		proxy.ServeHTTP(w, r)
	})
}

func reverseProxy(engine string) http.Handler {
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: engine})
	proxy.Transport = &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}
	return proxy
}

// serveRouter runs the request router like the command semmoe router, from a snapshot and the plans in its directory,
// without an API server and without a store. As an endpoint picker it serves gateways by TLS.
func serveRouter(ctx context.Context, dir string, policy dispatch.Policy, asPicker bool) (string, error) {
	free, err := freePorts(4)
	if err != nil {
		return "", err
	}
	clients, err := kubernetes.NewForConfig(&rest.Config{Host: fmt.Sprintf("https://127.0.0.1:%d", free[2])})
	if err != nil {
		return "", err
	}
	pool := router.DefaultPoolOptions()
	pool.Policy = policy
	options := router.Options{
		Pool:         pool,
		ProxyOptions: router.ProxyOptions{RankHeader: "X-Data-Parallel-Rank", MaxBodyBytes: 32 << 20, EndpointWait: 10 * time.Second},
		Namespace:    "bench", Selector: "bench=true", SnapshotDir: dir, Host: "127.0.0.1", Port: free[0], MetricsPort: free[1],
		FetchPlan: func(_ context.Context, _, dir string) error {
			_, _, err := plan.Read(dir)
			return err
		},
	}
	if asPicker {
		config, err := picker.TLSConfig("", "", "")
		if err != nil {
			return "", err
		}
		options.EndpointPicker = &router.EndpointPickerOptions{Port: free[0], HealthPort: free[3], TLS: config}
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx, clients, options) }()
	metrics := fmt.Sprintf("http://127.0.0.1:%d/metrics", free[1])
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		select {
		case err := <-ended:
			return "", fmt.Errorf("the router ended: %w", err)
		default:
		}
		if page, err := get(metrics); err == nil && strings.Contains(page, `semmoe_router_plans{state="pending"} 0`) && !strings.Contains(page, "semmoe_router_backends 0\n") {
			return net.JoinHostPort("127.0.0.1", strconv.Itoa(free[0])), nil
		}
	}
	return "", errors.New("the router has not loaded pods and plans within 1 minute")
}

func get(url string) (string, error) {
	response, err := http.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	return string(page), err
}

func freePorts(n int) ([]int, error) {
	var free []int
	for range n {
		port, _, err := ports.Hold()
		if err != nil {
			return nil, err
		}
		free = append(free, port)
	}
	return free, nil
}

// residentMiB reads the current and the maximum resident memory of a process from the operating system.
func residentMiB(pid int) (now, peak float64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(status)) {
		var name string
		var kib float64
		if n, _ := fmt.Sscan(line, &name, &kib); n != 2 {
			continue
		}
		switch name {
		case "VmRSS:":
			now = kib / 1024
		case "VmHWM:":
			peak = kib / 1024
		}
	}
	return now, peak, nil
}
