// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/progress"
)

// cluster is the cluster in which the demo runs.
type cluster struct {
	kubeconfig string
	kubectl    string
	local      *localcluster.Cluster // nil for an existing cluster
	// onNode is true if this machine reaches Services by their cluster IP.
	onNode bool
	stop   func()
}

func startCluster(ctx context.Context, s settings, out *progress.Progress) (*cluster, error) {
	binaries, err := localcluster.FindBinaries()
	if err != nil {
		return nil, err
	}
	c := &cluster{kubeconfig: s.kubeconfig, kubectl: filepath.Join(binaries, "kubectl"), stop: func() {}}
	if s.kubeconfig != "" {
		return c, out.Step(ctx, "existing cluster answers", func(func(string)) error {
			_, err := c.run(ctx, nil, "version")
			return err
		})
	}
	err = out.Step(ctx, "local control plane and node", func(func(string)) error {
		local, err := localcluster.Start(ctx, localcluster.Options{
			Binaries: binaries,
			Images:   map[string]string{s.image: filepath.Join(s.repository, "bin", "semmoe"), s.engineImage: filepath.Join(s.repository, "bin", "semmoe-refengine")},
			Forward:  7, // both acts' Services, the other request router, the artifact store, two managers, the proxy to pods
		})
		if errors.Is(err, localcluster.ErrNamespacesRefused) {
			return fmt.Errorf("%w (KUBECONFIG=... make demo uses an existing cluster)", err)
		}
		if err != nil {
			return err
		}
		c.local, c.kubeconfig = local, local.Kubeconfig()
		c.stop = func() {
			if err := local.Stop(); err != nil {
				fmt.Fprintln(os.Stderr, "demo: failed to stop the local cluster:", err)
			}
		}
		return nil
	})
	return c, err
}

// run runs kubectl and returns its standard output.
func (c *cluster) run(ctx context.Context, stdin []byte, args ...string) (string, error) {
	command := exec.CommandContext(ctx, c.kubectl, args...)
	command.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig)
	command.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// reach returns an address at which this machine reaches the Service: a forwarded port on 127.0.0.1, or the cluster IP.
func (c *cluster) reach(ctx context.Context, namespace, service string, port int) (string, error) {
	if c.local != nil {
		return c.local.Forward(ctx, namespace, service, port)
	}
	ip, err := c.run(ctx, nil, "get", "service", "-n", namespace, service, "-o", "jsonpath={.spec.clusterIP}")
	if err != nil {
		return "", err
	}
	// On a node of the cluster, the cluster IP works. Other machines reach Services only through the API server.
	address := net.JoinHostPort(ip, fmt.Sprint(port))
	if answers(ctx, address, c.onNode) {
		c.onNode = true
		return address, nil
	}
	return c.portForward(ctx, namespace, service, port)
}

// answers reports whether a Service's address accepts connections from this machine. It waits up to 30 seconds on a
// node, because a node refuses connections until it knows the Service's first pod, and drops them until it knows the
// Service. Waiting is better than port forwarding: forwarded connections break under many concurrent requests.
func answers(ctx context.Context, address string, onNode bool) bool {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		connection, err := net.DialTimeout("tcp", address, 2*time.Second)
		if err == nil {
			connection.Close()
			return true
		}
		if !onNode && !errors.Is(err, syscall.ECONNREFUSED) {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (c *cluster) portForward(ctx context.Context, namespace, service string, port int) (string, error) {
	command := exec.CommandContext(ctx, c.kubectl, "port-forward", "-n", namespace, "service/"+service, fmt.Sprintf(":%d", port))
	command.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig)
	stdout, err := command.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := command.Start(); err != nil {
		return "", err
	}
	stop := c.stop
	c.stop = func() {
		command.Process.Kill() //nolint:errcheck // fails only if the process has ended
		command.Wait()         //nolint:errcheck // killed
		stop()
	}
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		// Forwarding from 127.0.0.1:45678 -> 8000
		if rest, ok := strings.CutPrefix(lines.Text(), "Forwarding from 127.0.0.1:"); ok {
			local, _, _ := strings.Cut(rest, " ")
			go func() {
				for lines.Scan() { // kubectl blocks if its output is not read
				}
			}()
			return "127.0.0.1:" + local, nil
		}
	}
	return "", errors.New("kubectl port-forward ended before it printed a local port")
}
