// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/clientauth"
	"github.com/semmoe/operator/internal/router/tlsfiles"
)

// securityFlags are the flags for keys, and for TLS to engines. TLS for clients and for gateways shares its flags.
type securityFlags struct {
	keysDir, engineKeyFile                            string
	engineTLS                                         bool
	engineCAFile, engineCertFile, engineClientKeyFile string
	engineServerName                                  string
	requestsPerMinute, pending                        int
}

func (s *securityFlags) add(command *cobra.Command) {
	flags := command.Flags()
	flags.StringVar(&s.keysDir, "api-keys-dir", "", "directory with one file for each client, such as a mounted Secret: its name is the name of the client, its content the API key; re-read after each change (default: every client is served)")
	flags.IntVar(&s.requestsPerMinute, "client-requests-per-minute", 0, "maximum rate of requests of one API key at this router; requests above it get status 429; 0 means no limit")
	flags.IntVar(&s.pending, "client-pending-limit", 0, "maximum number of concurrent requests of one API key at this router; requests above it get status 429; 0 means no limit")
	flags.BoolVar(&s.engineTLS, "engine-tls", false, "TLS to all engine pods; without it, the annotation "+semmoev1.AnnotationScheme+" of a pod, or with --backends the scheme https, selects TLS")
	flags.StringVar(&s.engineCAFile, "engine-tls-ca-file", "", "PEM file with the certificate authorities of the engines, re-read for each connection (default: those of the system)")
	flags.StringVar(&s.engineCertFile, "engine-tls-cert-file", "", "PEM file with the certificate that engines request from the router, re-read for each connection")
	flags.StringVar(&s.engineClientKeyFile, "engine-tls-key-file", "", "PEM file with the private key of --engine-tls-cert-file")
	flags.StringVar(&s.engineServerName, "engine-tls-server-name", "", "name in the certificates of the engines (default: the host of the address)")
	flags.StringVar(&s.engineKeyFile, "engine-api-key-file", "", "file with the API key that engines require; it replaces the key of the client")
}

// maxEngineKeyBytes bounds the API key of the engines.
const maxEngineKeyBytes = 4 << 10

// complete sets the options of a router.
func (s *securityFlags) complete(o *router.Options, gateway *gatewayFlags) (err error) {
	if o.EndpointPicker != nil && (s.keysDir != "" || s.engineKeyFile != "") {
		return errors.New("--api-keys-dir and --engine-api-key-file cannot be combined with --endpoint-picker: the gateway authenticates clients and sends the requests")
	}
	if !gateway.on && gateway.certFile != "" {
		if o.TLS, err = tlsfiles.New(gateway.certFile, gateway.keyFile, gateway.clientCAFile); err != nil {
			return err
		}
	}
	switch {
	case s.requestsPerMinute < 0 || s.pending < 0:
		return fmt.Errorf("--client-requests-per-minute is %d and --client-pending-limit %d: want 0 or more", s.requestsPerMinute, s.pending)
	case s.keysDir == "" && (s.requestsPerMinute > 0 || s.pending > 0):
		return errors.New("--client-requests-per-minute and --client-pending-limit require --api-keys-dir: without keys, clients are not distinguished")
	}
	o.ClientLimits = &clientauth.Limits{RequestsPerMinute: s.requestsPerMinute, Pending: s.pending}
	if s.keysDir != "" {
		if o.Keys, err = clientauth.Load(s.keysDir); err != nil {
			return fmt.Errorf("--api-keys-dir: %w", err)
		}
	}
	o.Engines.RequireTLS, o.Engines.ServerName = s.engineTLS, s.engineServerName
	if (s.engineCertFile == "") != (s.engineClientKeyFile == "") {
		return fmt.Errorf("--engine-tls-cert-file is %q and --engine-tls-key-file %q: want both, or neither", s.engineCertFile, s.engineClientKeyFile)
	}
	if s.engineCertFile != "" || s.engineCAFile != "" || s.engineServerName != "" {
		if o.Engines.TLS, err = tlsfiles.New(s.engineCertFile, s.engineClientKeyFile, s.engineCAFile); err != nil {
			return err
		}
	}
	if s.engineKeyFile == "" {
		return nil
	}
	key, err := regularfile.Read(s.engineKeyFile, maxEngineKeyBytes)
	if err != nil {
		return fmt.Errorf("--engine-api-key-file: %w", err)
	}
	key = bytes.TrimSpace(key)
	if len(key) == 0 || bytes.ContainsFunc(key, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return fmt.Errorf("--engine-api-key-file: the key in %q is invalid: printable ASCII characters without spaces are allowed", s.engineKeyFile)
	}
	o.Engines.APIKey = string(key)
	return nil
}
