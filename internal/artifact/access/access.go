// SPDX-License-Identifier: Apache-2.0

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
	caKey = "ca.crt"
	// controllerRetry limits the time that a reconciliation waits for an unreachable store. The reconciliation is
	// requeued after an error.
	controllerRetry = 5 * time.Second
)

// ErrNoStore reports that no store is configured.
var ErrNoStore = errors.New("no artifact store is configured: start the manager with --store-url")

// Access connects to the store.
type Access struct {
	// URL is the address of the store. It is empty if there is no store.
	URL string
	// TokenFile is the path of the manager's token for the store.
	TokenFile string
	// CA is the ConfigMap with the CA certificate of the store under the key ca.crt.
	CA types.NamespacedName
	// Reader reads the ConfigMap without a cache.
	Reader client.Reader
	// Dial, if set, replaces the default dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	mu     sync.Mutex
	client *Client
	ca     string
}

// Authority returns the CA certificate of the store, as PEM.
func (a *Access) Authority(ctx context.Context) (string, error) {
	if a == nil || a.URL == "" {
		return "", ErrNoStore
	}
	var published corev1.ConfigMap
	if err := a.Reader.Get(ctx, a.CA, &published); err != nil {
		return "", fmt.Errorf("failed to get the CA certificate of the artifact store, which the store publishes at its first start: %w", err)
	}
	if published.Data[caKey] == "" {
		return "", fmt.Errorf("CA certificate of the artifact store: ConfigMap %s has no key %s", a.CA, caKey)
	}
	return published.Data[caKey], nil
}

// Client returns a client with the manager's token.
func (a *Access) Client(ctx context.Context) (*Client, error) {
	ca, err := a.Authority(ctx)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client != nil && a.ca == ca {
		return a.client, nil
	}
	made, err := NewClient(Config{URL: a.URL, CA: []byte(ca), TokenFile: a.TokenFile, RetryFor: controllerRetry, Dial: a.Dial})
	if err != nil {
		return nil, err
	}
	a.client, a.ca = made, ca
	return made, nil
}

// Env returns the environment variables of the store for a container.
func (a *Access) Env(authority string) []corev1.EnvVar {
	return []corev1.EnvVar{{Name: artifact.URLVariable, Value: a.URL}, {Name: artifact.CAVariable, Value: authority}}
}
