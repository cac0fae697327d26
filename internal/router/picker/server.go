package picker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/semmoe/operator/internal/router/client"
)

// The services that a health check can ask for.
const (
	// LivenessService serves while the process does.
	LivenessService = "liveness"
	// ReadinessService, and the service of the protocol itself, serve while endpoints are known and new requests welcome.
	ReadinessService = "readiness"
)

// messageSlack is what a message may have beside a body of the largest size: headers and metadata.
const messageSlack = 1 << 20

// Options are the settings of a server.
type Options struct {
	// TLS is nil for plain text.
	TLS *tls.Config
	// MaxBodyBytes bounds a request's body, which is kept in memory until an endpoint is picked.
	MaxBodyBytes int64
	// Bodies bounds what the bodies of all requests take at once; nil for client.NewBodies.
	Bodies *client.Bodies
}

// Server serves the protocol, and the health of it.
type Server struct {
	service, probes *grpc.Server
	health          *health.Server
	running         *client.Running
}

// NewServer makes a server for a Picker. It is not ready before SetReady.
func NewServer(picker Picker, options Options) *Server {
	s := &Server{service: grpc.NewServer(serverOptions(options)...), probes: grpc.NewServer(), health: health.NewServer(), running: &client.Running{}}
	if options.Bodies == nil {
		options.Bodies = client.NewBodies(options.MaxBodyBytes)
	}
	extprocv3.RegisterExternalProcessorServer(s.service, &processor{picker: picker, maxBody: options.MaxBodyBytes, bodies: options.Bodies, running: s.running})
	// A gateway's health check comes where its requests do, the kubelet's to a port without TLS.
	healthpb.RegisterHealthServer(s.service, s.health)
	healthpb.RegisterHealthServer(s.probes, s.health)
	s.health.SetServingStatus(LivenessService, healthpb.HealthCheckResponse_SERVING)
	s.SetReady(false)
	return s
}

func serverOptions(options Options) []grpc.ServerOption {
	all := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(int(min(options.MaxBodyBytes, 1<<30)) + messageSlack),
		// Gateways keep a connection for long and ask now and then whether it lives. The default refuses more than one such
		// question in five minutes, and ends the connection with all its streams.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	if options.TLS != nil {
		all = append(all, grpc.Creds(credentials.NewTLS(options.TLS)))
	}
	return all
}

// SetReady says whether requests are welcome.
func (s *Server) SetReady(ready bool) {
	state := healthpb.HealthCheckResponse_NOT_SERVING
	if ready {
		state = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(ReadinessService, state)
	s.health.SetServingStatus(extprocv3.ExternalProcessor_ServiceDesc.ServiceName, state)
}

// Serve serves gateways, and probes, which use no TLS, until Shutdown.
func (s *Server) Serve(gateways, probes net.Listener) error {
	var group errgroup.Group
	group.Go(func() error { return untilStopped(s.service, gateways) })
	group.Go(func() error { return untilStopped(s.probes, probes) })
	return group.Wait()
}

// untilStopped serves until the server is stopped, which it may be before it has begun.
func untilStopped(server *grpc.Server, listener net.Listener) error {
	if err := server.Serve(listener); !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// Shutdown takes no new requests, and lets those that run finish until the context ends; then it breaks them off, and says
// so.
func (s *Server) Shutdown(ctx context.Context) error {
	s.SetReady(false)
	defer s.probes.Stop()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		s.service.GracefulStop()
	}()
	idle, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // GracefulStop waits minutes for a connection whose handshake does not end
		if s.running.Idle(idle) {
			s.service.Stop()
		}
	}()
	select {
	case <-finished:
		return nil
	case <-ctx.Done():
		s.service.Stop()
		<-finished
		return fmt.Errorf("requests were broken off: %w", ctx.Err())
	}
}

// processor is the service of the protocol.
type processor struct {
	extprocv3.UnimplementedExternalProcessorServer
	picker  Picker
	maxBody int64
	bodies  *client.Bodies
	running *client.Running
}

// Process serves one request of a gateway.
func (p *processor) Process(incoming extprocv3.ExternalProcessor_ProcessServer) error {
	defer p.running.Begin()()
	x := &exchange{stream: &stream{ExternalProcessor_ProcessServer: incoming}, picker: p.picker, maxBody: p.maxBody, bodies: p.bodies}
	return x.run()
}
