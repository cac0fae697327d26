// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/rpc"
	"os"
	"strconv"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/semmoe/operator/test/connectproxy"
	"github.com/semmoe/operator/test/localcluster/internal/controlplane"
	"github.com/semmoe/operator/test/localcluster/internal/node"
)

// Name is argv[0] of the supervisor.
const Name = "localcluster-supervisor"

// RunIfAsked never returns in a process whose argv[0] is Name. It does nothing in other processes.
func RunIfAsked() {
	if len(os.Args) != 2 || os.Args[0] != Name {
		return
	}
	if err := run(os.Args[1]); err != nil {
		klog.ErrorS(err, "Supervisor failed")
		klog.Flush()
		os.Exit(1)
	}
	os.Exit(0)
}

// run serves the control connection until it is closed, which also happens when the parent process ends.
func run(listenerCount string) error {
	const controlFD, lockFD, firstListenerFD = 3, 4, 5
	n, err := strconv.Atoi(listenerCount)
	if err != nil {
		return err
	}
	// The lock file stays open and locked until the last process of the namespace has ended.
	syscall.CloseOnExec(lockFD)
	control := os.NewFile(controlFD, "control")
	connection, err := net.FileConn(control)
	if err != nil {
		return fmt.Errorf("failed to open the control connection: %w", err)
	}
	control.Close()
	s := &Supervisor{forwarded: map[int]ForwardArgs{}}
	for i := range n {
		f := os.NewFile(firstListenerFD+uintptr(i), "listener")
		l, err := net.FileListener(f)
		if err != nil {
			return fmt.Errorf("failed to open an inherited listener: %w", err)
		}
		f.Close()
		s.listeners = append(s.listeners, l)
	}
	server := rpc.NewServer()
	if err := server.RegisterName(service, s); err != nil {
		return err
	}
	server.ServeConn(connection)
	return nil
}

// service is the RPC service name on the control connection; see Method.
const service = "Supervisor"

// Method returns the full name of an RPC method.
func Method(name string) string { return service + "." + name }

// Supervisor is the first process of the namespaces. Its exported methods are the RPC methods of the control
// connection.
type Supervisor struct {
	listeners []net.Listener

	mu        sync.Mutex
	node      *node.Agent          // nil before Up
	apiServer *controlplane.Server // nil before Up
	forwarded map[int]ForwardArgs
}

// UpArgs contains the arguments of Up. The fields equal those of the cluster's options.
type UpArgs struct {
	Binaries, Dir string
	Images        map[string]string
	GPUs          int
}

// Target is a port of a Service.
type Target struct {
	Namespace, Service string
	Port               int
}

// ForwardArgs contains the arguments of Forward and Proxy. Listener is the index of an inherited listener. Index 0 is
// reserved for the API server.
type ForwardArgs struct {
	Listener int
	To       Target
}

// Nothing is the type of empty arguments and results.
type Nothing struct{}

// SetUpNamespaces prepares the new namespaces. It is a separate call because some machines allow the creation of
// namespaces but no operation inside them.
func (s *Supervisor) SetUpNamespaces(Nothing, *Nothing) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("failed to make mounts private: %w", err)
	}
	// Best effort: the kernel refuses this mount if an outer container hides parts of /proc. The outer proc is then
	// sufficient.
	_ = unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if err := setUpNetwork(); err != nil {
		return err
	}
	// Containers without capabilities may listen on port 80 of their pod's address.
	return os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("0"), 0o644)
}

// setUpNetwork makes every address of the pod and Service ranges local, with a route of type local. No interface
// address has to be added or removed for single addresses.
func setUpNetwork() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	for _, cidr := range []string{controlplane.Address + "/32", controlplane.PodRange, controlplane.ServiceRange} {
		_, network, err := net.ParseCIDR(cidr)
		if err != nil {
			return err
		}
		route := &netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: network, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
		}
		if err := netlink.RouteAdd(route); err != nil {
			return fmt.Errorf("failed to make %s local: %w", cidr, err)
		}
	}
	return nil
}

// Up starts the control plane and the node. It returns when the API server answers and the node is registered.
func (s *Supervisor) Up(args UpArgs, _ *Nothing) error {
	ctx := context.Background()
	config, err := clientcmd.BuildConfigFromFlags("", controlplane.Kubeconfig(args.Dir))
	if err != nil {
		return err
	}
	config.QPS = -1 // No limit: there is one node.
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ready, failed := make(chan struct{}), make(chan error, 1)
	var apiServer *controlplane.Server
	go func() {
		err := controlplane.Run(ctx, args.Binaries, args.Dir, client, func(server *controlplane.Server) {
			apiServer = server
			close(ready)
		})
		select {
		case <-ready:
			// The cluster is unusable: exit, which ends every process of the cluster.
			klog.ErrorS(err, "Control plane failed")
			klog.Flush()
			os.Exit(1)
		default:
			failed <- err
		}
	}()
	select {
	case <-ready:
	case err := <-failed:
		return err
	}
	go serve(s.listeners[0], func() (net.Conn, error) {
		return net.Dial("tcp", net.JoinHostPort(controlplane.Address, strconv.Itoa(controlplane.SecurePort)))
	})
	n := node.New(node.Options{
		Name: "local", Address: controlplane.Address, PodRange: controlplane.PodRange,
		Dir: args.Dir, Images: args.Images, GPUs: args.GPUs, Client: client,
	})
	if err := n.Start(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node, s.apiServer = n, apiServer
	return nil
}

// PauseAPIServer suspends or resumes the API server.
func (s *Supervisor) PauseAPIServer(paused bool, _ *Nothing) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.apiServer == nil {
		return errNotUp
	}
	if paused {
		return s.apiServer.Signal(unix.SIGSTOP)
	}
	return s.apiServer.Signal(unix.SIGCONT)
}

// RestartAPIServer kills the API server, which restarts immediately.
func (s *Supervisor) RestartAPIServer(Nothing, *Nothing) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.apiServer == nil {
		return errNotUp
	}
	return s.apiServer.Restart()
}

// Forward starts to forward the connections of an inherited listener to a Service.
func (s *Supervisor) Forward(args ForwardArgs, _ *Nothing) error {
	l, err := s.take(args)
	if err != nil {
		return err
	}
	go serve(l, func() (net.Conn, error) {
		return s.node.DialService(args.To.Namespace, args.To.Service, args.To.Port)
	})
	return nil
}

// Proxy starts to tunnel the connections of an inherited listener to pod addresses (HTTP CONNECT).
func (s *Supervisor) Proxy(args ForwardArgs, _ *Nothing) error {
	l, err := s.take(args)
	if err != nil {
		return err
	}
	go func() {
		if err := http.Serve(l, connectproxy.Dial(new(net.Dialer).DialContext)); err != nil { //nolint:gosec // a test tool
			klog.ErrorS(err, "Proxy failed", "address", l.Addr())
		}
	}()
	return nil
}

// take returns an unused inherited listener and marks it as used.
func (s *Supervisor) take(args ForwardArgs) (net.Listener, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node == nil {
		return nil, errNotUp
	}
	if args.Listener < 1 || args.Listener >= len(s.listeners) {
		return nil, fmt.Errorf("listener %d does not exist", args.Listener)
	}
	if _, taken := s.forwarded[args.Listener]; taken {
		return nil, fmt.Errorf("listener %d is in use", args.Listener)
	}
	s.forwarded[args.Listener] = args
	return s.listeners[args.Listener], nil
}

// SetImages adds or replaces images.
func (s *Supervisor) SetImages(images map[string]string, _ *Nothing) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node == nil {
		return errNotUp
	}
	s.node.SetImages(images)
	return nil
}

var errNotUp = errors.New("the cluster is not up")

// serve forwards each connection of l to a connection that dial returns.
func serve(l net.Listener, dial func() (net.Conn, error)) {
	if err := node.Forward(l, dial); err != nil {
		klog.ErrorS(err, "Forwarding failed", "address", l.Addr())
	}
}
