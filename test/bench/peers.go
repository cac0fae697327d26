// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// peer is another program that forwards requests to engines. It is measured if it is installed.
type peer struct {
	name, program string
	// arguments returns the arguments of the program that listens on a port of 127.0.0.1. It may write files to the
	// directory.
	arguments func(dir string, port int, engines []string) ([]string, error)
}

// peers are the programs that are compared with the request router. The first two read the prompts.
var peers = []peer{
	{"sglang-router cache_aware", "sglang-router", func(_ string, port int, engines []string) ([]string, error) {
		return pythonRouter("launch", port, engines), nil
	}},
	{"vllm-router cache_aware", "vllm-router", func(_ string, port int, engines []string) ([]string, error) {
		return pythonRouter("", port, engines), nil
	}},
	{"nginx", "nginx", func(dir string, port int, engines []string) ([]string, error) {
		servers := ""
		for _, engine := range engines {
			servers += "server " + engine + ";"
		}
		file := filepath.Join(dir, "nginx.conf")
		return []string{"-p", dir, "-e", "stderr", "-c", file}, os.WriteFile(file, fmt.Appendf(nil, `
daemon off; master_process off; pid nginx.pid; error_log stderr error;
events {}
http {
  access_log off; client_max_body_size 32m; client_body_buffer_size 1m; keepalive_requests 1000000;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  upstream engines { %s keepalive 64; keepalive_requests 1000000; }
  server { listen 127.0.0.1:%d; location / { proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } }
}
`, servers, port), 0o644)
	}},
	{"haproxy", "haproxy", func(dir string, port int, engines []string) ([]string, error) {
		servers := ""
		for i, engine := range engines {
			servers += fmt.Sprintf("  server e%d %s\n", i, engine)
		}
		file := filepath.Join(dir, "haproxy.cfg")
		return []string{"-db", "-f", file}, os.WriteFile(file, fmt.Appendf(nil, `
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
frontend clients
  bind 127.0.0.1:%d
  default_backend engines
backend engines
%s`, port, servers), 0o644)
	}},
	{"Envoy", "envoy", func(dir string, port int, engines []string) ([]string, error) {
		endpoints := ""
		for _, engine := range engines {
			host, port, _ := strings.Cut(engine, ":")
			endpoints += fmt.Sprintf("{endpoint: {address: {socket_address: {address: %s, port_value: %s}}}},", host, port)
		}
		file := filepath.Join(dir, "envoy.yaml")
		return []string{"--base-id", strconv.Itoa(port), "--concurrency", "2", "--log-level", "error", "-c", file}, os.WriteFile(file, fmt.Appendf(nil, `
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: %d}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          http_filters: [{name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
          route_config: {virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: engines, timeout: 0s}}]}]}
  clusters:
  - name: engines
    connect_timeout: 5s
    load_assignment: {cluster_name: engines, endpoints: [{lb_endpoints: [%s]}]}
`, port, endpoints), 0o644)
	}},
}

// pythonRouter returns the arguments of the routers of SGLang and vLLM, which have the same origin.
func pythonRouter(command string, port int, engines []string) (args []string) {
	if command != "" {
		args = append(args, command)
	}
	args = append(args, "--host", "127.0.0.1", "--port", strconv.Itoa(port), "--prometheus-port", strconv.Itoa(port+1),
		"--policy", "cache_aware", "--log-level", "error", "--worker-urls")
	for _, engine := range engines {
		args = append(args, "http://"+engine)
	}
	return args
}

// start starts a peer and waits until it forwards a request. It returns nil if the program is not installed.
func (p *peer) start(ctx context.Context, dir string, port int, engines []string, probe []byte) (*process, error) {
	program, err := exec.LookPath(p.program)
	if err != nil {
		return nil, nil //nolint:nilerr // it is not installed
	}
	dir = filepath.Join(dir, p.program)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	arguments, err := p.arguments(dir, port, engines)
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	started := &process{address: fmt.Sprintf("127.0.0.1:%d", port), command: exec.CommandContext(ctx, program, arguments...)}
	started.command.Stdout, started.command.Stderr = log, log
	if err := started.command.Start(); err != nil {
		return nil, err
	}
	client := newLoadClient()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if err = client.send(ctx, started, probe); err == nil {
			return started, nil
		}
	}
	started.stop() //nolint:errcheck // it does not serve
	text, _ := os.ReadFile(log.Name())
	return nil, fmt.Errorf("%s does not serve: %w: %s", p.name, err, text)
}

// treeUsage returns the processor time and the memory of a process and its descendants. The processor time is that of
// the threads that still run.
func treeUsage(root int) (usage, error) {
	var u usage
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return u, err
	}
	parents := map[int]int{}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if stat, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "stat")); err == nil {
			var parent int
			var state string
			if _, err := fmt.Sscan(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), &state, &parent); err == nil {
				parents[pid] = parent
			}
		}
	}
	for pid := range parents {
		for at := pid; at > 1; at = parents[at] {
			if at != root {
				continue
			}
			threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
			if err != nil {
				return u, err
			}
			for _, thread := range threads {
				var nanoseconds int64
				if stat, err := os.ReadFile(thread); err == nil {
					if _, err := fmt.Sscan(string(stat), &nanoseconds); err != nil {
						return u, err
					}
				}
				u.CPUSeconds += float64(nanoseconds) / 1e9
			}
			now, peak, err := residentMiB(pid)
			if err != nil {
				return u, err
			}
			u.ResidentMiB, u.PeakMiB = u.ResidentMiB+now, u.PeakMiB+peak
			break
		}
	}
	return u, nil
}
