// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/semmoe/operator/test/load"
)

// The fixed addresses of the namespace.
const (
	// Address is the address of the API server and of the only node.
	Address = "10.89.0.1"
	// SecurePort is the API server's port.
	SecurePort = 6443
	// ServiceRange is the range of Service cluster addresses.
	ServiceRange = "10.96.0.0/16"
	// PodRange is the range of pod addresses.
	PodRange = "10.244.0.0/16"

	kubernetesService = "10.96.0.1"
	etcdURL           = "http://127.0.0.1:2379"
	etcdPeerURL       = "http://127.0.0.1:2380"
)

// The programs.
const (
	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
)

// Programs returns the names of the programs that Run needs in its binaries directory.
func Programs() []string { return []string{etcd, apiServer, controllerManager, scheduler} }

// Server is the API server's process.
type Server struct {
	mu         sync.Mutex
	process    *os.Process // nil until the process is started
	restarting bool
}

// Signal sends a signal to the API server.
func (s *Server) Signal(signal os.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process.Signal(signal)
}

// Restart kills the API server; Run then starts a new one.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restarting = true
	return s.process.Kill()
}

func (s *Server) started(process *os.Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.process, s.restarting = process, false
}

func (s *Server) toBeRestarted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.restarting
}

// Run runs the programs of the directory binaries. State, credentials (see WriteCredentials) and logs are below dir.
// Run returns when ctx ends, or when a program exits, unless Restart has killed the API server. The error names the
// program and its log. Run calls ready once, when the API server answers.
func Run(ctx context.Context, binaries, dir string, client kubernetes.Interface, ready func(*Server)) error {
	if err := os.MkdirAll(filepath.Join(dir, "etcd"), 0o700); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	start := func(name string, args []string) {
		group.Go(func() error {
			return runProgram(ctx, filepath.Join(binaries, name), args, logFile(dir, name), func(*os.Process) {})
		})
	}
	start(etcd, etcdArgs(dir))
	server := &Server{}
	group.Go(func() error {
		for {
			err := runProgram(ctx, filepath.Join(binaries, apiServer), apiServerArgs(dir), logFile(dir, apiServer), server.started)
			if ctx.Err() != nil || !server.toBeRestarted() {
				return err
			}
		}
	})
	group.Go(func() error {
		if err := waitReady(ctx, client); err != nil {
			return fmt.Errorf("kube-apiserver does not become ready: %w (log: %s)", err, logFile(dir, apiServer))
		}
		start(controllerManager, controllerManagerArgs(dir))
		start(scheduler, schedulerArgs(dir))
		ready(server)
		return nil
	})
	return group.Wait()
}

// WriteAuditPolicy enables the audit log of the API server with an audit.k8s.io/v1 Policy. It must be called before
// Run.
func WriteAuditPolicy(dir, policy string) error {
	return os.WriteFile(auditPolicyFile(dir), []byte(policy), 0o600)
}

func auditPolicyFile(dir string) string { return filepath.Join(dir, "audit-policy.yaml") }

func logFile(dir, name string) string { return filepath.Join(dir, "logs", name+".log") }

func runProgram(ctx context.Context, path string, args []string, log string, started func(*os.Process)) error {
	output, err := os.Create(log)
	if err != nil {
		return err
	}
	defer output.Close()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdout, cmd.Stderr = output, output
	if err = cmd.Start(); err == nil {
		started(cmd.Process)
		err = cmd.Wait()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("%s exited (%v); log: %s", filepath.Base(path), err, log)
}

// waitReady polls /readyz every 50 ms, because this wait is the larger part of the startup time.
func waitReady(ctx context.Context, client kubernetes.Interface) error {
	const limit, interval = 90 * time.Second, 50 * time.Millisecond
	var clock load.Clock
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if clock.Elapsed() > limit {
			return errors.New("not ready within " + limit.String() + " (scaled by machine load)")
		}
		if _, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx); err == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func etcdArgs(dir string) []string {
	return []string{
		"--name=local", "--data-dir=" + filepath.Join(dir, "etcd"), "--log-level=warn",
		"--listen-client-urls=" + etcdURL, "--advertise-client-urls=" + etcdURL,
		"--listen-peer-urls=" + etcdPeerURL, "--initial-advertise-peer-urls=" + etcdPeerURL, "--initial-cluster=local=" + etcdPeerURL,
		"--unsafe-no-fsync",
	}
}

func apiServerArgs(dir string) []string {
	keys := filepath.Join(dir, "pki")
	args := []string{
		"--etcd-servers=" + etcdURL,
		"--bind-address=" + Address, "--advertise-address=" + Address, fmt.Sprintf("--secure-port=%d", SecurePort),
		"--service-cluster-ip-range=" + ServiceRange,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--client-ca-file=" + filepath.Join(keys, "ca.crt"),
		"--tls-cert-file=" + filepath.Join(keys, "apiserver.crt"), "--tls-private-key-file=" + filepath.Join(keys, "apiserver.key"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + filepath.Join(keys, "serviceaccount.crt"),
		"--service-account-signing-key-file=" + filepath.Join(keys, "serviceaccount.key"),
	}
	if _, err := os.Stat(auditPolicyFile(dir)); err == nil {
		// Blocking mode: a buffered record would not be in the log yet when a test reads the log.
		args = append(args, "--audit-policy-file="+auditPolicyFile(dir), "--audit-log-path="+logFile(dir, "audit"), "--audit-log-mode=blocking")
	}
	return args
}

func controllerManagerArgs(dir string) []string {
	keys := filepath.Join(dir, "pki")
	return []string{
		"--kubeconfig=" + filepath.Join(keys, controllerManager+".kubeconfig"),
		"--bind-address=127.0.0.1", "--leader-elect=false", "--use-service-account-credentials=true",
		"--service-account-private-key-file=" + filepath.Join(keys, "serviceaccount.key"),
		"--root-ca-file=" + filepath.Join(keys, "ca.crt"),
		"--cluster-signing-cert-file=" + filepath.Join(keys, "ca.crt"), "--cluster-signing-key-file=" + filepath.Join(keys, "ca.key"),
		"--allocate-node-cidrs=false", "--service-cluster-ip-range=" + ServiceRange,
		// With the default of 20 requests/s the controllers start 4 s later.
		"--kube-api-qps=500", "--kube-api-burst=1000",
		// The node ends together with the cluster, so a late heartbeat only means a busy machine or a paused API
		// server. With the default of 50 s an outage of one minute would mark the node as lost and evict its pods.
		"--node-monitor-grace-period=10m",
		// A claim that the binder sees before its volume is Available is bound at the next resync, 15 s by default.
		"--pvclaimbinder-sync-period=2s",
	}
}

func schedulerArgs(dir string) []string {
	return []string{
		"--kubeconfig=" + filepath.Join(dir, "pki", scheduler+".kubeconfig"),
		"--bind-address=127.0.0.1", "--leader-elect=false",
	}
}
