// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/rpc"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/localcluster/internal/controlplane"
	"github.com/semmoe/operator/test/localcluster/internal/sandbox"
	"github.com/semmoe/operator/test/localcluster/internal/supervisor"
)

const defaultGPUs = 64

// ErrNamespacesRefused is wrapped by the error of Start if this machine does not allow the current user to create the
// namespaces of the cluster.
var ErrNamespacesRefused = errors.New("this machine does not allow the user namespace that the local cluster needs")

const namespacesHint = "check the sysctls user.max_user_namespaces, kernel.unprivileged_userns_clone and " +
	"kernel.apparmor_restrict_unprivileged_userns, or, inside a container, its seccomp profile; " +
	"or set KUBECONFIG to use an existing cluster"

// RunChildIfAsked must be the first call of main or TestMain in a program that calls Start. The supervisor process of
// the cluster and each of its containers start as a copy of that program. In such a copy RunChildIfAsked never returns.
// In other processes it does nothing.
func RunChildIfAsked() {
	sandbox.RunIfAsked()
	supervisor.RunIfAsked()
}

// Options configures Start.
type Options struct {
	// Binaries is the directory of the Kubernetes programs; see FindBinaries.
	Binaries string
	// Dir contains the state and the logs. It must be empty or contain the state of an earlier cluster, which is
	// removed. If Dir is empty, Start creates a temporary directory, which is removed when the cluster stops.
	Dir string
	// Images maps image references to static binaries (absolute paths). A container of an image runs the binary as
	// /<base name>. Any other image results in ErrImagePull.
	Images map[string]string
	// GPUs is the number of nvidia.com/gpu that the node advertises; 0 means 64.
	GPUs int
	// Forward is the number of Services that can be forwarded to ports of 127.0.0.1; see Cluster.Forward.
	// Cluster.PodProxy uses one of these ports.
	Forward int
	// AuditPolicy is an audit.k8s.io/v1 Policy that selects the requests in the audit log of the API server; see
	// Cluster.AuditLogs. If AuditPolicy is empty, the API server writes no audit log.
	AuditPolicy string
	// Log receives progress lines. It may be nil.
	Log io.Writer
}

func (o *Options) validate() error {
	if err := checkBinaries(o.Binaries); err != nil {
		return fmt.Errorf("options: Binaries: %w", err)
	}
	if err := checkImages(o.Images); err != nil {
		return fmt.Errorf("options: Images: %w", err)
	}
	if o.GPUs < 0 {
		return fmt.Errorf("options: GPUs is %d: must not be negative", o.GPUs)
	}
	if o.Forward < 0 {
		return fmt.Errorf("options: Forward is %d: must not be negative", o.Forward)
	}
	return nil
}

// Cluster is a running local cluster. Its methods may be called concurrently.
type Cluster struct {
	dir       *stateDir
	config    *rest.Config
	listeners []*net.TCPListener // the first is for the API server, the others are for Forward
	control   *rpc.Client
	kill      context.CancelFunc // nil until the supervisor is started
	ended     chan struct{}      // closed after the last process has ended
	endError  error              // set before ended is closed if the supervisor exited before Stop
	stop      func() error

	mu       sync.Mutex
	forwards map[supervisor.Target]int // index of the listener
}

// Start creates a cluster. It returns when the API server answers, the default ServiceAccount exists and the node is
// ready for pods. Canceling ctx, or calling Stop, ends all processes of the cluster. The error wraps
// ErrNamespacesRefused if the machine does not allow the required namespaces.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.GPUs == 0 {
		o.GPUs = defaultGPUs
	}
	progress := newProgress(o.Log)
	dir, err := openStateDir(o.Dir)
	if err != nil {
		return nil, err
	}
	c := &Cluster{dir: dir, ended: make(chan struct{}), forwards: map[supervisor.Target]int{}}
	c.stop = sync.OnceValue(c.end)
	if err := c.start(ctx, o, progress); err != nil {
		if stopErr := c.Stop(); stopErr != nil {
			err = errors.Join(err, stopErr)
		}
		return nil, err
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context, o Options, progress func(string)) error {
	for range 1 + o.Forward {
		l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			return err
		}
		c.listeners = append(c.listeners, l)
	}
	if err := c.prepare(); err != nil {
		return err
	}
	if o.AuditPolicy != "" {
		if err := controlplane.WriteAuditPolicy(c.dir.path, o.AuditPolicy); err != nil {
			return err
		}
	}
	if err := c.launch(ctx); err != nil {
		return err
	}
	if err := c.call(ctx, "SetUpNamespaces", supervisor.Nothing{}); err != nil {
		return namespacesRefused(err)
	}
	up := supervisor.UpArgs{Binaries: o.Binaries, Dir: c.dir.path, Images: o.Images, GPUs: o.GPUs}
	if err := c.call(ctx, "Up", up); err != nil {
		return fmt.Errorf("failed to start the control plane: %w", err)
	}
	progress("API server ready at " + c.config.Host)
	client, err := kubernetes.NewForConfig(c.config)
	if err != nil {
		return err
	}
	if err := c.waitUsable(ctx, client); err != nil {
		return err
	}
	progress("Node ready")
	return nil
}

// prepare writes the credentials, which contain the port of the API server outside the network namespace.
func (c *Cluster) prepare() error {
	if err := controlplane.WriteCredentials(c.dir.path, c.listeners[0].Addr().String()); err != nil {
		return err
	}
	var err error
	if c.config, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig()); err != nil {
		return err
	}
	// The default limit of 5 requests/s is intended for a shared cluster.
	c.config.QPS, c.config.Burst = 200, 400
	return nil
}

// launch starts the supervisor in its namespaces and connects to it.
func (c *Cluster) launch(ctx context.Context) error {
	log, err := os.Create(c.supervisorLog())
	if err != nil {
		return err
	}
	defer log.Close()
	connection, control, err := controlConnection()
	if err != nil {
		return err
	}
	defer control.Close()
	files := []*os.File{control, c.dir.lock}
	for _, l := range c.listeners {
		f, err := l.File()
		if err != nil {
			return errors.Join(err, connection.Close())
		}
		defer f.Close()
		files = append(files, f)
	}

	ctx, c.kill = context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{supervisor.Name, strconv.Itoa(len(c.listeners))}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = files
	cmd.SysProcAttr = namespaces()
	started := make(chan error, 1)
	go func() {
		defer close(c.ended)
		// Pdeathsig kills the supervisor when the thread that started it ends, so this thread must outlive the
		// supervisor.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		if err := cmd.Wait(); ctx.Err() == nil {
			c.endError = fmt.Errorf("the local cluster ended unexpectedly (%v); see %s", err, c.supervisorLog())
		}
	}()
	if err := <-started; err != nil {
		return errors.Join(namespacesRefused(err), connection.Close())
	}
	c.control = rpc.NewClient(connection)
	return nil
}

// controlConnection returns the two ends of the RPC connection to the supervisor: the caller's connection and the file
// that the supervisor inherits. The supervisor ends when the caller's end is closed.
func controlConnection() (net.Conn, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "supervisor"), os.NewFile(uintptr(pair[1]), "control")
	defer ours.Close()
	connection, err := net.FileConn(ours)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return connection, theirs, nil
}

// namespaces returns the process attributes that create the supervisor's namespaces and map the caller's user and group
// ID to root.
func namespaces() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
		// In a new session, Ctrl-C reaches only the caller, which then decides when to stop the cluster.
		Setsid: true,
	}
}

func namespacesRefused(err error) error {
	return fmt.Errorf("%w (%w): %s", ErrNamespacesRefused, err, namespacesHint)
}

func (c *Cluster) supervisorLog() string { return filepath.Join(c.dir.path, "logs", "supervisor.log") }

// call calls a method of the supervisor. It returns early when ctx is done or the supervisor ends.
func (c *Cluster) call(ctx context.Context, method string, args any) error {
	call := c.control.Go(supervisor.Method(method), args, new(supervisor.Nothing), make(chan *rpc.Call, 1))
	select {
	case <-call.Done:
		if errors.Is(call.Error, rpc.ErrShutdown) || errors.Is(call.Error, io.ErrUnexpectedEOF) {
			<-c.ended
			return c.whyEnded(ctx)
		}
		return call.Error
	case <-c.ended:
		return c.whyEnded(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *Cluster) whyEnded(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if c.endError != nil {
		return c.endError
	}
	return errors.New("the local cluster is stopped")
}

// waitUsable waits until a pod in the default namespace can be admitted and scheduled.
func (c *Cluster) waitUsable(ctx context.Context, client kubernetes.Interface) error {
	const limit, interval = 60 * time.Second, 50 * time.Millisecond
	var clock load.Clock
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if clock.Elapsed() > limit {
			return fmt.Errorf("the cluster is not usable after %s (scaled by machine load); see %s", limit, filepath.Dir(c.supervisorLog()))
		}
		_, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		if err == nil && nodeUsable(ctx, client) {
			return nil
		}
		select {
		case <-ticker.C:
		case <-c.ended:
			return c.whyEnded(ctx)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func nodeUsable(ctx context.Context, client kubernetes.Interface) bool {
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil || len(nodes.Items) == 0 || len(nodes.Items[0].Spec.Taints) > 0 {
		return false
	}
	for _, condition := range nodes.Items[0].Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Stop ends every process of the cluster, waits for their end, and removes a temporary state directory. It returns an
// error if the cluster ended before Stop was called. Further calls return the same result without any effect.
func (c *Cluster) Stop() error { return c.stop() }

func (c *Cluster) end() error {
	if c.kill != nil {
		c.kill()
		<-c.ended
	}
	if c.control != nil {
		_ = c.control.Close()
	}
	for _, l := range c.listeners {
		_ = l.Close()
	}
	return errors.Join(c.endError, c.dir.close())
}

// Done returns a channel that is closed when the cluster has ended: after Stop, after the end of its context, or after
// an unexpected exit.
func (c *Cluster) Done() <-chan struct{} { return c.ended }

// RESTConfig returns an administrator's configuration for use outside the cluster.
func (c *Cluster) RESTConfig() *rest.Config { return rest.CopyConfig(c.config) }

// Kubeconfig returns the path of an administrator's kubeconfig for use outside the cluster.
func (c *Cluster) Kubeconfig() string { return controlplane.OutsideKubeconfig(c.dir.path) }

// Logs returns the path of the newest log file of a container, or "" if the container has never run.
func (c *Cluster) Logs(namespace, pod, container string) string {
	return newestLog(filepath.Join(c.dir.path, "logs"), namespace, pod, container)
}

// AuditLogs returns the paths of the audit log files of the API server, with one JSON object per line; see
// Options.AuditPolicy.
func (c *Cluster) AuditLogs() ([]string, error) {
	return filepath.Glob(filepath.Join(c.dir.path, "logs", "audit*.log"))
}

// Forward makes a port of a Service reachable from outside the cluster and returns its address on 127.0.0.1. The
// Service need not exist yet: while it has no endpoint, each connection is closed immediately. Repeated calls for the
// same Service and port return the same address. Each Service port uses one of the Options.Forward listeners.
func (c *Cluster) Forward(ctx context.Context, namespace, service string, port int) (string, error) {
	return c.listen(ctx, "Forward", supervisor.Target{Namespace: namespace, Service: service, Port: port})
}

// PodProxy returns the URL of an HTTP proxy on 127.0.0.1 that tunnels (CONNECT) to pod addresses. The proxy uses one of
// the Options.Forward listeners.
func (c *Cluster) PodProxy(ctx context.Context) (*url.URL, error) {
	address, err := c.listen(ctx, "Proxy", supervisor.Target{})
	if err != nil {
		return nil, err
	}
	return &url.URL{Scheme: "http", Host: address}, nil
}

// listen returns the address of the listener for a target. The first call for a target starts the listener with the
// given method of the supervisor.
func (c *Cluster) listen(ctx context.Context, method string, to supervisor.Target) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	index, ok := c.forwards[to]
	if !ok {
		index = 1 + len(c.forwards)
		if index >= len(c.listeners) {
			return "", fmt.Errorf("all %d ports of Options.Forward are in use", len(c.listeners)-1)
		}
		if err := c.call(ctx, method, supervisor.ForwardArgs{Listener: index, To: to}); err != nil {
			return "", err
		}
		c.forwards[to] = index
	}
	return c.listeners[index].Addr().String(), nil
}

// SetImages adds images to Options.Images, or replaces existing ones. The change applies to containers that start after
// the call.
func (c *Cluster) SetImages(images map[string]string) error {
	if err := checkImages(images); err != nil {
		return err
	}
	return c.call(context.Background(), "SetImages", images)
}

// PauseAPIServer suspends the API server, which simulates a network that drops all packets: connections are accepted
// but no request is answered. ResumeAPIServer resumes it. While the API server is paused, the node keeps its pods
// running, restarts containers that exit, and forwards connections to Services.
func (c *Cluster) PauseAPIServer(ctx context.Context) error {
	return c.call(ctx, "PauseAPIServer", true)
}

// ResumeAPIServer undoes PauseAPIServer.
func (c *Cluster) ResumeAPIServer(ctx context.Context) error {
	return c.call(ctx, "PauseAPIServer", false)
}

// RestartAPIServer kills the API server and starts a new one, which answers after some seconds.
func (c *Cluster) RestartAPIServer(ctx context.Context) error {
	return c.call(ctx, "RestartAPIServer", supervisor.Nothing{})
}

func newProgress(w io.Writer) func(string) {
	start := time.Now()
	return func(message string) {
		if w != nil {
			fmt.Fprintf(w, "[%5.1f s] %s\n", time.Since(start).Seconds(), message)
		}
	}
}

// newestLog returns the log with the highest restart count, which is the number at the end of the file name.
func newestLog(dir, namespace, pod, container string) string {
	prefix := strings.Join([]string{namespace, pod, container}, "_") + "_"
	paths, _ := filepath.Glob(filepath.Join(dir, prefix+"*.log"))
	newest, restarts := "", -1
	for _, path := range paths {
		number := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), prefix), ".log")
		if n, err := strconv.Atoi(number); err == nil && n > restarts {
			newest, restarts = path, n
		}
	}
	return newest
}
