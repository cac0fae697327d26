// SPDX-License-Identifier: Apache-2.0

package managerauth

import (
	"context"
	"crypto/tls"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/semmoe/operator/internal/certs"
)

const (
	// Port is the port of a request router on which managers read observations and live samples.
	Port = 9091
	// AuthorityVariable is the environment variable of a router with the certificates of the managers' authority, as
	// PEM.
	AuthorityVariable = "SEMMOE_MANAGER_CA"
	// SecretName is the name of the Secret with the managers' authority.
	SecretName = "semmoe-manager-ca"

	authoritySubject = "semmoe manager"
	handshakeTimeout = 5 * time.Second
)

// Identity authenticates a manager to request routers.
type Identity struct {
	// Authority contains the PEM certificates with which routers verify the managers.
	Authority string
	// HTTP sends requests to routers with a client certificate.
	HTTP *http.Client
}

// Load reads the managers' authority, or creates it where the Secret does not exist. An authority in its last third is
// replaced; its certificate stays valid for routers that were started before.
func Load(ctx context.Context, clients kubernetes.Interface, secret types.NamespacedName) (*Identity, error) {
	own, err := certs.Renew(ctx, clients, secret, authoritySubject, time.Now())
	if err != nil {
		return nil, err
	}
	bundle, err := own.Bundle()
	if err != nil {
		return nil, err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSHandshakeTimeout = handshakeTimeout
	transport.TLSClientConfig = &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: certs.NewClientIssuer(own).ClientCertificate,
		InsecureSkipVerify:   true, //nolint:gosec // the package documentation gives the reason
	}
	return &Identity{Authority: string(bundle), HTTP: &http.Client{Transport: transport, CheckRedirect: RefuseRedirect}}, nil
}

// RefuseRedirect keeps a pod from redirecting a request of the manager to another address (http.Client.CheckRedirect).
func RefuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
