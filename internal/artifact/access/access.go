package access

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/semmoe/operator/internal/artifact"
)

const (
	// CAVariable is the environment variable that holds the certificate authority of the store, as PEM.
	CAVariable = "SEMMOE_STORE_CA"
	// URLVariable is the environment variable that holds the store's address.
	URLVariable = "SEMMOE_STORE_URL"
	// TokenFile is where the pods' token for the store is mounted.
	TokenFile = "/var/run/secrets/semmoe.io/store/token"

	tokenDir     = "/var/run/secrets/semmoe.io/store"
	tokenVolume  = "semmoe-store-token"
	tokenSeconds = 3600
	caKey        = "ca.crt"
	// controllerRetry bounds how long a reconciliation waits for a store that is away: it comes back by itself.
	controllerRetry = 5 * time.Second
)

// ErrNoStore is the error where no store is configured.
var ErrNoStore = errors.New("no artifact store is configured: start the manager with --store-url")

// Access is how the store is reached.
type Access struct {
	// URL is the store's address, empty where there is none.
	URL string
	// TokenFile holds the manager's own token for the store.
	TokenFile string
	// CA names the ConfigMap that holds the store's certificate authority under ca.crt.
	CA types.NamespacedName
	// Reader reads it, past any cache.
	Reader client.Reader
	// Dial, where set, connects to the store's address in place of the network's own way.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	mu     sync.Mutex
	client *artifact.Client
	ca     string
}

// Authority is the store's certificate authority as PEM.
func (a *Access) Authority(ctx context.Context) (string, error) {
	if a == nil || a.URL == "" {
		return "", ErrNoStore
	}
	var published corev1.ConfigMap
	if err := a.Reader.Get(ctx, a.CA, &published); err != nil {
		return "", fmt.Errorf("the artifact store's certificate authority (it publishes it when it first starts): %w", err)
	}
	if published.Data[caKey] == "" {
		return "", fmt.Errorf("the artifact store's certificate authority: ConfigMap %s has no %s", a.CA, caKey)
	}
	return published.Data[caKey], nil
}

// Client is a client with the manager's own token.
func (a *Access) Client(ctx context.Context) (*artifact.Client, error) {
	ca, err := a.Authority(ctx)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client != nil && a.ca == ca {
		return a.client, nil
	}
	made, err := artifact.NewClient(artifact.Config{URL: a.URL, CA: []byte(ca), TokenFile: a.TokenFile, RetryFor: controllerRetry, Dial: a.Dial})
	if err != nil {
		return nil, err
	}
	a.client, a.ca = made, ca
	return made, nil
}

// Env is what a container needs to know of the store.
func (a *Access) Env(authority string) []corev1.EnvVar {
	return []corev1.EnvVar{{Name: URLVariable, Value: a.URL}, {Name: CAVariable, Value: authority}}
}

// TokenVolume is a volume with a token of the pod's own for the store, TokenMount mounts it.
func TokenVolume() corev1.Volume {
	seconds := int64(tokenSeconds)
	return corev1.Volume{Name: tokenVolume, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{
			Audience: artifact.Audience, ExpirationSeconds: &seconds, Path: "token",
		}}},
	}}}
}

// TokenMount mounts TokenVolume.
func TokenMount() corev1.VolumeMount {
	return corev1.VolumeMount{Name: tokenVolume, MountPath: tokenDir, ReadOnly: true}
}
